"""From step times to decisions: pure functions over cases and their results.

Nothing here reaches into the simulator, and the simulator knows nothing of what is decided.
"""
