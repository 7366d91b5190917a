"""The command line of this process, as a user types it again."""

import shlex
import sys

_JOBS = "--jobs"
"""How many processes compute changes nothing of what they find."""


def command_line(program: str) -> str:
    """What a page names as its command, for a shell: without `--jobs`, which changes no page."""
    words = iter(sys.argv[1:])
    kept = [program]
    for word in words:
        if word == _JOBS:
            next(words, None)
        elif not word.startswith(f"{_JOBS}="):
            kept.append(word)
    return shlex.join(kept)
