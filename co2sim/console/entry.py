"""How a command line starts and ends: one line on stderr for whatever went wrong."""

import os
import sys

import typer

from co2sim.errors import Co2simError

INTERRUPTED = 130
"""Exit code of a shell for a process ended by control-C."""


def run_app(app: typer.Typer, kept: str = "nothing was written") -> None:
    """Run a command. Bad input ends it with one line on stderr and exit code 2.

    `kept` says what is on the disk after control-C.
    """
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except (Co2simError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:  # the output is full, or gone
        print(f"error: cannot write the output: {error.strerror}", file=sys.stderr)
        code = 2
    if code == INTERRUPTED:  # typer, too, turns control-C into this code
        print(f"interrupted; {kept}", file=sys.stderr)
    sys.exit(code or 0)
