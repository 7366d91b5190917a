"""The command line `realrun`."""

import os
import sys

from co2sim.common.cli import run_app


def main() -> None:
    """Run a command of `realrun`."""
    # Before PyTorch is loaded: else it warns in every rank that it cannot find the name of a host.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    launcher = "RANK" not in os.environ  # which must see that SIGTERM has ended a rank
    if not launcher:
        _keep_stdout()
    try:
        run_app("realrun.cli.app", kept="what had finished is kept", sigterm=launcher)
    except ModuleNotFoundError as error:
        needed = {"torch": "PyTorch", "safetensors": "safetensors"}.get(error.name or "")
        if needed is None:
            raise
        print(f"error: {needed} is not installed: pip install '.[torch]'", file=sys.stderr)
        sys.exit(2)


def _keep_stdout() -> None:
    """Leave the output to what commands print.

    Gloo of torch 2.9 writes there, too, that it has connected; NCCL what NCCL_DEBUG asks for, which
    goes to stderr.
    """
    if sys.stdout is None or sys.stderr is None:
        return  # which is refused as it is
    sys.stdout.flush()
    stdout = os.dup(1)
    if "NCCL_DEBUG" in os.environ:
        os.dup2(2, 1)
    else:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    sys.stdout = os.fdopen(stdout, "w", encoding=sys.stdout.encoding, errors="backslashreplace")
