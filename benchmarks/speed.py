"""How fast the simulator is: `make bench`. Prints a Markdown table with the machine's description.

In-process figures come from one warm process; commands and the large unfolded run from processes of
their own. Every figure is the median of several runs, with the fastest and the slowest.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from co2sim import Case, __version__, run
from co2sim.catalog import load_cluster, load_model
from co2sim.noise import Noise

CLUSTER, MODEL = load_cluster("a100-roce800").value, load_model("llama-7b").value
CO2 = "co2(tau=48, worker=node, inner=zero2)"
FOLDED = ("ddp", "zero3", "zeropp")


@dataclass(frozen=True)
class Row:
    """A measurement and the figure it should meet."""

    what: str
    times: list[float]
    unit: str
    target: str

    def __str__(self) -> str:
        """One line of the table."""
        scale = 1e3 if self.unit == "ms" else 1.0
        low, middle, high = (scale * f(self.times) for f in (min, statistics.median, max))
        digits = 1 if self.unit == "ms" else 2
        return (
            f"| {self.what} | {middle:.{digits}f} {self.unit}"
            f" | {low:.{digits}f} - {high:.{digits}f} | {self.target} |"
        )


def case(strategy: str, gpus: int = 128) -> Case:
    """The 7B model (32 layers and embedding and head) on nodes of 8 A100."""
    return Case(cluster=CLUSTER, model=MODEL, strategy=strategy, gpus=gpus)


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after one warm-up."""
    call()
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def interleaved(calls: dict[int, Callable[[], object]], repeats: int) -> dict[int, list[float]]:
    """As `timed`, the calls in turn, so that a drift of the machine meets all of them."""
    found: dict[int, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            found[key] += timed(call, 1)
    return found


def process(arguments: list[str], repeats: int) -> list[float]:
    """Wall seconds of a command, from start to end."""
    return timed(lambda: subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL), repeats)


def unfolded() -> None:
    """One zero3 step of 1024 GPUs with jitter, unfolded: prints seconds and peak GiB."""
    job = Case(
        cluster=CLUSTER,
        model=MODEL,
        strategy="zero3",
        gpus=1024,
        noise=Noise(jitter=0.05),
        rounds=1,
    )
    start = time.perf_counter()
    result = run(job)
    seconds = time.perf_counter() - start
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    high = kib * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"seconds": seconds, "gib": high / 2**30, "rounds": result.rounds_simulated}))


def machine() -> str:
    """Processor, cores, memory, system, Python."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":")[1] for line in info.read_text().splitlines() if "model name" in line
        ]
        name = models[0].strip() if models else name
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()},"
        f" Python {platform.python_version()}, co2sim {__version__}"
    )


def main() -> None:
    """Measure everything and print the table."""
    rows = [
        Row(f"`{name}`, 7B, 128 GPUs", timed(case(name).run, 30), "ms", "<= 10 ms")
        for name in FOLDED
    ]
    rows.append(Row(f"`{CO2}`, 7B, 128 GPUs", timed(case(CO2).run, 10), "ms", "<= 150 ms"))
    sizes = interleaved({n: case("zero3", n).run for n in (128, 1024, 16384)}, 30)
    base = statistics.median(sizes[128])
    for gpus, times in sizes.items():
        ratio = statistics.median(times) / base
        rows.append(Row(f"`zero3`, {gpus} GPUs ({ratio:.2f} x 128)", times, "ms", "0.8 to 1.2 x"))
    alone = [sys.executable, __file__, "--unfolded"]
    runs = [json.loads(subprocess.check_output(alone)) for _ in range(3)]
    what = f"`zero3` step, 1024 GPUs with jitter, unfolded ({max(r['gib'] for r in runs):.2f} GiB)"
    rows.append(Row(what, [r["seconds"] for r in runs], "s", "<= 10 s, < 2 GiB"))
    command = str(Path(sys.executable).with_name("co2sim"))
    run = [command, "run", "-c", "a100-tcp80", "-m", "llama-7b", "-s", "zero3"]
    rows.append(Row("`co2sim run` from the shell", process(run, 10), "s", "<= 0.8 s"))
    rows.append(Row("`co2sim --help`", process([command, "--help"], 10), "s", "<= 0.3 s"))
    print(f"{machine()}\n\n| what | median | range | target |\n|---|---|---|---|")
    print("\n".join(map(str, rows)))


if __name__ == "__main__":
    if "--unfolded" in sys.argv:
        unfolded()
    else:
        main()
