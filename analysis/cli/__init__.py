"""The command line `co2analysis`."""

from analysis.cli.app import app
from co2sim.console.entry import run_app

__all__ = ["app", "main"]


def main() -> None:
    """Run a command. Bad input ends it with one line on stderr and exit code 2."""
    run_app(app)
