"""How fast the simulator is: `make bench`. Prints a Markdown table; with --out it is kept.

    python benchmarks/speed.py            # a minute or two
    python benchmarks/speed.py --quick    # every measurement once, smaller where it takes long

All times are CPU time, which other programs on the machine change least; what is timed has one
thread. In-process figures come from one warm process; commands and steps with jitter from
processes of their own. Every run has another bandwidth, as in a sweep. Every figure is the median
of several runs, with the fastest and the slowest. The last column says whether the targets are met;
it decides nothing: a machine may be slow.
"""

import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import TypeVar

from reports import folder, machine, made_by, parser, table

from co2sim import Case, run, simulate
from co2sim.catalog import load_cluster, load_model
from co2sim.simulation.noise import Noise

CLUSTER, MODEL = load_cluster("a100-roce800").value, load_model("llama-7b").value
CO2 = "co2.published(tau=48, worker=node, inner=zero2)"
FOLDED = ("ddp", "zero3", "zeropp", "fsdp")
DEEP = ("zero1", "fsdp", "co2.published(tau=4)")
LARGE = 16384
JITTERED = "zero3", "fsdp"
UNEVEN = ("--jitter", "0.05"), ("--straggle", "0.1")

SCALES = {"ms": 1e3, "s": 1.0}
"""Units of a time, in one second."""


@dataclass(frozen=True)
class Target:
    """A range that `measured` should be in, both ends allowed."""

    measured: float
    most: float
    unit: str
    least: float = 0.0

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.least <= self.measured <= self.most

    def __str__(self) -> str:
        span = f"{self.least:g} to {self.most:g}" if self.least else f"<= {self.most:g}"
        return f"{span} {self.unit}"


@dataclass(frozen=True)
class SpeedLine:
    """A measurement, in seconds, and the targets that it should meet; printed in `unit`."""

    what: str
    times: list[float]
    unit: str
    targets: list[Target]

    @property
    def cells(self) -> dict[str, str]:
        """One line of the table."""
        scale = SCALES[self.unit]
        low, middle, high = (scale * f(self.times) for f in (min, statistics.median, max))
        digits = 1 if self.unit == "ms" else 2
        return {
            "what": self.what,
            "median": f"{middle:.{digits}f} {self.unit}",
            "range": f"{low:.{digits}f} - {high:.{digits}f}",
            "target": ", ".join(map(str, self.targets)),
            "met": "yes" if all(target.met for target in self.targets) else "no",
        }


def within(times: list[float], most: float, unit: str) -> Target:
    """The target that the median is at most a number of `unit`."""
    return Target(SCALES[unit] * statistics.median(times), most, unit)


def limited(what: str, times: list[float], most: float, unit: str) -> SpeedLine:
    """A line whose only target is `within`."""
    return SpeedLine(what, times, unit, [within(times, most, unit)])


def runs(strategy: str, gpus: int = 128) -> Callable[[], object]:
    """What simulates the 7B model with a strategy, each time with another bandwidth."""
    bandwidths = (CLUSTER.inter.bandwidth * (1 + number / 1000) for number in range(100))
    cases = cycle([case(strategy, gpus, bandwidth) for bandwidth in bandwidths])
    return lambda: run(next(cases))


def new_schedules(strategy: str) -> Callable[[], object]:
    """The same with a schedule that was not built before; the option changes nothing in it."""
    numbers = count()
    return lambda: run(case(f"{strategy}(max_live={10**12 + next(numbers)})"))


def deep(strategy: str, micro_steps: int = 512) -> Callable[[], object]:
    """What simulates GPT-3 of 175B in 8 stages on 1024 H100, with many micro-steps."""
    one = Case(
        cluster="dgx-h100",
        model="gpt3-175b",
        strategy=strategy,
        overrides={"nodes": "128"},
        tp=8,
        pp=8,
        accumulation=micro_steps,
    )
    return lambda: run(one)


def case(strategy: str, gpus: int = 128, bandwidth: float = CLUSTER.inter.bandwidth) -> Case:
    """The 7B model (32 layers and embedding and head) on nodes of 8 A100."""
    cluster = replace(CLUSTER, inter=replace(CLUSTER.inter, bandwidth=bandwidth))
    return Case(cluster=cluster, model=MODEL, strategy=strategy, gpus=gpus)


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after one warm-up."""
    call()
    found = []
    for _ in range(repeats):
        start = used()
        call()
        found.append(used() - start)
    return found


def used() -> float:
    """Seconds of CPU time of this process, and of those that it started and that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


K = TypeVar("K")


def interleaved(calls: dict[K, Callable[[], object]], repeats: int) -> dict[K, list[float]]:
    """As `timed`, the calls in turn, so that a drift of the machine meets all of them."""
    found: dict[K, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            found[key] += timed(call, 1)
    return found


def process(arguments: list[str], repeats: int) -> list[float]:
    """Seconds of a command, from start to end."""
    return timed(lambda: subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL), repeats)


def unfolded(strategy: str, gpus: int) -> None:
    """A step with jitter, in which no rank stands for others: prints seconds and peak GiB."""
    job = Case(
        cluster=CLUSTER,
        model=MODEL,
        strategy=strategy,
        gpus=gpus,
        noise=Noise(jitter=0.05),
        rounds=1,
    )
    start = used()
    result = run(job)
    seconds = used() - start
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    high = kib * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"seconds": seconds, "gib": high / 2**30, "rounds": result.rounds_simulated}))


def question(**batch: object) -> Callable[[], object]:
    """What answers a question on 64 H100, each time with another bandwidth."""
    speeds = cycle(f"{400 + number} Gbit/s" for number in range(100))
    return lambda: simulate(
        "dgx-h100",
        "llama-7b",
        "zero2",
        gpus=64,
        overrides={"inter.bandwidth": next(speeds)},
        **batch,  # type: ignore[arg-type]
    )


def measurements(*, quick: bool) -> list[SpeedLine]:
    """All of them; `quick`: once each."""
    few, many = (1, 1) if quick else (10, 30)
    loop = timed(lambda: sum(range(10**7)), many)
    found = [SpeedLine("sum of 10 million numbers, to compare machines", loop, "ms", [])]
    given = {"micro_batch": 1, "accumulation": 1, "recompute": "none"}
    for what, batch, most in (("given", given, 8), ("chosen", {}, 25)):
        times = timed(question(**batch), many)
        found.append(limited(f"`zero2`, 7B, 64 H100, batch {what}", times, most, "ms"))
    found += [
        limited(f"`{name}`, 7B, 128 GPUs", timed(runs(name), many), 4, "ms") for name in FOLDED
    ]
    found.append(limited(f"`{CO2}`, 7B, 128 GPUs", timed(runs(CO2), few), 30, "ms"))
    new = timed(new_schedules("zeropp"), few)
    found.append(limited("`zeropp`, 7B, 128 GPUs, with a new schedule", new, 10, "ms"))
    for name in DEEP:
        what = f"`{name}`, 175B in 8 stages, 512 micro-steps"
        found.append(limited(what, timed(deep(name), few), 1, "s"))
    sizes = interleaved({n: runs("zero3", n) for n in (128, 1024, LARGE)}, many)
    base = statistics.median(sizes[128])
    for gpus, times in sizes.items():
        ratio = statistics.median(times) / base
        what = f"`zero3`, {gpus} GPUs ({ratio:.2f} x 128)"
        found.append(SpeedLine(what, times, "ms", [Target(ratio, 1.2, "x", least=0.8)]))
    for name in JITTERED:
        for gpus, limit in ((64, 1),) if quick else ((512, 1), (LARGE, 3)):
            alone = [sys.executable, __file__, "--unfolded", name, str(gpus)]
            large = [json.loads(subprocess.check_output(alone)) for _ in range(1 if quick else 3)]
            memory = max(one["gib"] for one in large)
            what = f"`{name}` step, {gpus} GPUs with jitter ({memory:.2f} GiB)"
            times = [one["seconds"] for one in large]
            targets = [within(times, limit, "s"), Target(memory, 4, "GiB")]
            found.append(SpeedLine(what, times, "s", targets))
    return found + commands(few)


def commands(repeats: int) -> list[SpeedLine]:
    """What takes as long as the shell says."""
    found = []
    command = str(Path(sys.executable).with_name("co2sim"))
    shell = [command, "run", "-c", "a100-tcp80", "-m", "llama-7b", "-s", "zero3"]
    found.append(limited("`co2sim run` from the shell", process(shell, repeats), 0.8, "s"))
    help_ = process([command, "--help"], repeats)
    found.append(limited("`co2sim --help`", help_, 0.3, "s"))
    uneven = [command, "run", "-c", "a100-tcp80", "-m", "transnormer-7b"]
    uneven += ["-s", "co2.published:tau=48"]
    for option in UNEVEN:
        times = process([*uneven, "-g", "96", *option], min(repeats, 3))
        found.append(
            limited(f"`{' '.join(['co2sim', *uneven[1:], '-g 96', *option])}`", times, 3, "s")
        )
    return found


def main() -> None:
    """Measure everything and print the table."""
    command = parser(__doc__, "every measurement once, 64 GPUs unfolded")
    step = ("STRATEGY", "GPUS")
    command.add_argument("--unfolded", nargs=2, metavar=step, help="only a step with jitter")
    options = command.parse_args()
    if options.unfolded:
        unfolded(options.unfolded[0], int(options.unfolded[1]))
        return
    rows = [one.cells for one in measurements(quick=options.quick)]
    text = f"# How fast the simulator is\n\n{machine()}\n\n{table(rows)}\n\n{made_by()}\n"
    if options.out:
        with folder(options) as out:
            (out / "speed.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
