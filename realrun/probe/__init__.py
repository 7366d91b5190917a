"""Measure the nodes at hand, and write what was found as a cluster file."""
