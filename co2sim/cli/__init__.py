"""The command line `co2sim`."""

import gc
import os

from co2sim.console import interrupts


def main() -> None:
    """Run a command of `co2sim`."""
    gc.set_threshold(100_000, 20, 20)  # a sixth of a short command went into collecting nothing
    # pydantic would read the metadata of every package that is installed, for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    with interrupts.noted():
        try:  # control-C while all this is imported, too, is one line
            from co2sim.cli.app import app  # noqa: PLC0415
            from co2sim.console.entry import run_app  # noqa: PLC0415
        except KeyboardInterrupt:
            interrupts.end()
        run_app(app)
