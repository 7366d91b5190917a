"""The command line `co2analysis`."""

from co2sim.common.cli import run_app


def main() -> None:
    """Run a command. Bad input ends it with one line on stderr and exit code 2."""
    run_app("analysis.cli.app")
