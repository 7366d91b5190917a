"""The command line of this process, as a user types it again."""

import shlex
import sys


def repeated() -> str:
    """What a page names as its command."""
    return shlex.join(["co2analysis", *sys.argv[1:]])
