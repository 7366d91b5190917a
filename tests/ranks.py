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
    dies: int | None = None,
    limit: float = 120.0,
    **arguments: Any,
) -> list[Any]:
    """What `MODULE.FUNCTION(world, **arguments)` gives on every rank; it must be JSON.

    The rank that `dies` gives None. All have `limit` seconds.
    """
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
            "import sys; from realrun.launch.local import run_local; sys.exit(run_local("
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
        assert dies is not None or done.returncode == 0, done.stdout + done.stderr
        answers = [Path(folder) / str(rank) for rank in range(nproc) if rank != dies]
        assert all(path.exists() for path in answers), done.stdout + done.stderr
        found = [json.loads(path.read_text()) for path in answers]
        return found if dies is None else [*found[:dies], None, *found[dies:]]
