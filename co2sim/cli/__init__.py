"""The command line `co2sim`."""

from co2sim.console import interrupts


def main() -> None:
    """Run a command of `co2sim`."""
    with interrupts.noted():
        try:  # control-C while all this is imported, too, is one line
            from co2sim.cli.app import app  # noqa: PLC0415
            from co2sim.console.entry import run_app  # noqa: PLC0415
        except KeyboardInterrupt:
            interrupts.end()
        run_app(app)
