"""A sweep of 100,000 cases on a Dask cluster that loses half of its workers, and on one process.

    python benchmarks/engines.py            # ten minutes on two free cores
    python benchmarks/engines.py --quick    # 3,000 cases

The cases are the cheapest that there are. One process computes them, and at the same time a
scheduler and four worker processes do, of which one is killed after a quarter of the cases, and
another after half. The last line reads the folder again: nothing is left to compute.

Writes benchmarks/results/engines.md.
"""

import hashlib
import json
import multiprocessing
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reports import installed, machine, made_by, parser, publish, table

from co2sim import GPU, Cluster, Link, Model, sweep_to
from co2sim.models.operators import plain_block

_WORKERS = 4
_LOST = (0.25, 0.5)
"""Shares of the cases after which a worker is killed."""
_QUICK = (50, 60)
_FULL = (400, 250)
"""Values of the micro-batch and of the size of buckets."""
_PART = 1000
"""Rows of a file."""
_PATIENCE = 60.0


def main() -> None:
    """Run all three, and write the table."""
    options = parser(__doc__, "3,000 cases").parse_args()
    sizes = _QUICK if options.quick else _FULL
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        with cluster(here) as (address, workers), processes() as fresh:
            running = fresh.submit(swept, here / "one", sizes)
            killer = Killer(here / "dask", sizes[0] * sizes[1], workers)
            killer.start()
            spread = fresh.submit(swept, here / "dask", sizes, address).result()
            killer.over.set()
            killer.join()
            alone = running.result()
            again = fresh.submit(swept, here / "dask", sizes).result()
        sums = {run: digest(here / run) for run in ("one", "dask")}
    rows = [
        row("one process", alone, sums["one"]),
        row(f"Dask, {_WORKERS} workers, {killer.killed} of them killed", spread, sums["dask"]),
        row("the folder of Dask again, one process", again, sums["dask"]),
    ]
    cases = sizes[0] * sizes[1]
    same = "the same" if sums["one"] == sums["dask"] else "NOT the same"
    text = f"""\
# A sweep on a cluster that loses half of its workers

{cases:,} cases of a model of one layer on two GPUs: {sizes[0]} micro-batches by {sizes[1]} sizes of
buckets, kept in a folder (`co2sim sweep --out`). One process, and a Dask scheduler with {_WORKERS}
workers of one thread on the same machine, at the same time. The bytes of both folders are {same}.

Time and memory are those of the process that asks; without Dask it simulates, too.

{table(rows)}

{machine()} Dask {installed("distributed")}, pyarrow {installed("pyarrow")}.

{made_by()}
"""
    publish(options, "engines", text)
    if sums["one"] != sums["dask"] or again["computed"]:
        sys.exit("the folders differ, or something was computed twice")


def row(what: str, found: dict[str, Any], digest: str) -> dict[str, str]:
    """A line of the table."""
    return {
        "run": what,
        "computed": f"{found['computed']:,}",
        "found": f"{found['reused']:,}",
        "time": f"{found['seconds']:.0f} s",
        "CPU time": f"{found['cpu']:.0f} s",
        "memory at most": f"{found['most'] / 2**20:.0f} MiB",
        "SHA-256 of all files": digest[:12],
    }


def processes() -> ProcessPoolExecutor:
    """What makes two runs at a time, each in a new process."""
    return ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), max_tasks_per_child=1)


def swept(folder: Path, sizes: tuple[int, int], address: str = "") -> dict[str, Any]:
    """Sweep, and measure this process."""
    gpu = GPU("small", 1e9, 1e12, {"bf16": 1e12}, ((1.0, 1.0),))
    two = Cluster(
        name="two GPUs",
        gpu=gpu,
        nodes=2,
        gpus_per_node=1,
        intra=Link(1e10),
        inter=Link(1e9),
        all_reduce="ring",
        backend="gloo",
    )
    model = Model("one layer", (plain_block("layer", (1000,), 1e6, 100.0),), tokens=1)
    vary = {
        "micro_batch": range(1, sizes[0] + 1),
        "strategy.bucket_mib": [n / 8 for n in range(1, sizes[1] + 1)],
    }
    began = time.monotonic()
    engine = {"engine": "dask", "scheduler": address} if address else {}
    kept = sweep_to(
        folder, two, model, "ddp", vary=vary, accumulation=1, recompute="none", **engine
    )
    if kept.failed:
        raise RuntimeError(f"{kept.failed:,} of {kept.cases:,} cases failed")
    return {
        "computed": kept.computed,
        "reused": kept.reused,
        "seconds": time.monotonic() - began,
        "cpu": time.process_time(),
        "most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


class Killer(threading.Thread):
    """Kills a worker each time that a further share of the cases is in the folder."""

    def __init__(self, place: Path, cases: int, workers: list[subprocess.Popen[bytes]]) -> None:
        super().__init__(daemon=True)
        self.over, self.killed = threading.Event(), 0
        self._place, self._cases, self._workers = place, cases, workers

    def run(self) -> None:
        """Until it has killed all that it should, or the sweep is over."""
        while self.killed < len(_LOST) and not self.over.wait(0.05):
            if _PART * len(list(self._place.glob("*.parquet"))) >= _LOST[self.killed] * self._cases:
                self._workers[self.killed].send_signal(signal.SIGKILL)
                self.killed += 1


@contextmanager
def cluster(here: Path) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler on this machine, as its address, and its workers; all gone at the end."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": here}
    module = [sys.executable, "-m", "distributed.cli.dask_"]
    local = ["--host", "127.0.0.1", "--no-dashboard"]
    told = here / "scheduler.json"
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *words: str) -> None:
        made = [*module[:-1], module[-1] + name, *words, *local]
        started.append(subprocess.Popen(made, **quiet))  # type: ignore[call-overload]

    try:
        start("scheduler", "--port", "0", "--scheduler-file", str(told))
        until = time.monotonic() + _PATIENCE
        while not told.exists() or not told.read_text("utf-8").endswith("}"):
            if time.monotonic() > until:
                sys.exit(f"Dask's scheduler did not start within {_PATIENCE:g} s")
            time.sleep(0.1)
        address = json.loads(told.read_text("utf-8"))["address"]
        for _ in range(_WORKERS):
            start("worker", address, "--nthreads", "1", "--no-nanny")
        yield address, started[1:]
    finally:
        for process in started:
            process.kill()
            process.wait()


def digest(place: Path) -> str:
    """The hash of all files, in order, with their names."""
    found = hashlib.sha256()
    for path in sorted(place.glob("*.parquet")):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
