"""The command line `realrun`."""

import sys

from co2sim.console.entry import run_app
from realrun.cli.app import app


def main() -> None:
    """Run a command of `realrun`."""
    try:
        run_app(app, kept="runs that had finished are kept")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("error: PyTorch is not installed: pip install 'co2sim[torch]'", file=sys.stderr)
        sys.exit(2)
