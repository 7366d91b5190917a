"""The command line `co2analysis`."""

from co2sim.console import interrupts


def main() -> None:
    """Run a command. Bad input ends it with one line on stderr and exit code 2."""
    with interrupts.noted():
        try:  # control-C while all this is imported, too, is one line
            from analysis.cli.app import app  # noqa: PLC0415
            from co2sim.console.entry import run_app  # noqa: PLC0415
        except KeyboardInterrupt:
            interrupts.end()
        run_app(app)
