"""The command line `realrun`."""

import os
import sys

from co2sim.console import interrupts


def main() -> None:
    """Run a command of `realrun`."""
    # Before PyTorch is loaded: else it warns in every rank that it cannot find the name of a host.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with interrupts.noted():  # later the launcher has handlers of its own
        try:  # control-C while all this is imported, too, is one line
            from co2sim.console.entry import run_app  # noqa: PLC0415
            from realrun.cli.app import app  # noqa: PLC0415

            interrupts.check()
        except KeyboardInterrupt:
            interrupts.end()
    try:
        run_app(app, kept="runs that had finished are kept")
    except ModuleNotFoundError as error:
        needed = {"torch": "PyTorch", "safetensors": "safetensors"}.get(error.name or "")
        if needed is None:
            raise
        print(f"error: {needed} is not installed: pip install 'co2sim[torch]'", file=sys.stderr)
        sys.exit(2)
