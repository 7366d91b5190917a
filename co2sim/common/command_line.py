"""The command line of this process, as a user types it again."""

import shlex
import sys

_WHO = ("--jobs", "--engine", "--scheduler")
"""Who computes, and how many, changes nothing of what they find."""


def command_line(program: str) -> str:
    """What a page names as its command, for a shell: without those, which change no page."""
    words = iter(sys.argv[1:])
    kept = [program]
    for word in words:
        if word in _WHO:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in _WHO)):
            kept.append(word)
    return shlex.join(kept)
