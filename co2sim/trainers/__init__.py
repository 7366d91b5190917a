"""The files that trainers read, as questions; and the choice of a plan, as their flags.

A table a trainer (`tables/*.toml`) says what its keys are here, which of them do not matter to
speed, and which do and cannot be expressed. No key has its own code.
"""
