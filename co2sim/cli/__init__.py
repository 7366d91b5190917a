"""The command line `co2sim`."""

from co2sim.cli.app import app
from co2sim.console.entry import run_app


def main() -> None:
    """Run a command of `co2sim`."""
    run_app(app)
