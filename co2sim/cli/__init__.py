"""The command line `co2sim`."""

import gc
import os
import sys


def main() -> None:
    """Run a command of `co2sim`."""
    gc.set_threshold(100_000, 20, 20)  # a sixth of a short command went into collecting nothing
    # pydantic would read the metadata of every package that is installed, for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from co2sim.common.cli import run_app  # noqa: PLC0415 - after these
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
    run_app("co2sim.cli.app")
