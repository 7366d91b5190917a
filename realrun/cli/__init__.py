"""The command line `realrun`."""

from co2sim.cli.entry import run_app
from realrun.cli.app import app


def main() -> None:
    """Run a command of `realrun`."""
    run_app(app)
