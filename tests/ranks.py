"""Run a function of a test module on several processes that talk over Gloo."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def on_ranks(
    function: str,
    nproc: int,
    *,
    gpus_per_node: int = 0,
    backend: str = "gloo",
    module: str = "workers",
    limit: float = 120.0,
    **arguments: Any,
) -> list[Any]:
    """What `MODULE.FUNCTION(world, **arguments)` gives on every rank, within `limit` seconds, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        request = json.dumps(
            {
                "module": module,
                "function": function,
                "arguments": arguments,
                "folder": folder,
                "backend": backend,
            }
        )
        script = (
            "import sys; from realrun.launch import run_local; sys.exit(run_local("
            f"[sys.executable, {str(ROOT / 'tests' / 'rank_main.py')!r}], {nproc},"
            f" environment={{'REQUEST': {request!r},"
            f" 'LOCAL_WORLD_SIZE': '{gpus_per_node or nproc}'}}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(nproc)]
