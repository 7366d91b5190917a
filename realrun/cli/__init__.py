"""The command line `realrun`."""

import os
import sys

from co2sim.common.cli import run_app


def main() -> None:
    """Run a command of `realrun`."""
    # Before PyTorch is loaded: else it warns in every rank that it cannot find the name of a host.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    launcher = "RANK" not in os.environ  # which must see that SIGTERM has ended a rank
    try:
        run_app("realrun.cli.app", kept="what had finished is kept", sigterm=launcher)
    except ModuleNotFoundError as error:
        needed = {"torch": "PyTorch", "safetensors": "safetensors"}.get(error.name or "")
        if needed is None:
            raise
        print(f"error: {needed} is not installed: pip install '.[torch]'", file=sys.stderr)
        sys.exit(2)
