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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

from reports import folder, machine, made_by, parser, table

from co2sim import Question, run, simulate
from co2sim.catalog import load_cluster, load_model
from co2sim.simulation.noise import Noise

CLUSTER, MODEL = load_cluster("a100-roce800").value, load_model("llama-7b").value
CO2 = "co2.published(tau=48, worker=node, inner=zero2)"
FOLDED = ("ddp", "zero3", "zeropp", "fsdp")
DEEP = ("zero1", "fsdp", "co2.published(tau=4)")
LARGE = 16384
GIVEN = {"micro_batch": 1, "accumulation": 1, "recompute": "none"}
JITTERED = "zero3", "fsdp"
UNEVEN = ("--jitter", "0.05"), ("--straggle", "0.1")

SCALES = {"ms": 1e3, "s": 1.0}
"""Units of a time, in one second."""


@dataclass(frozen=True)
class SpeedLine:
    """A measurement, in seconds, and the most of `unit`, if any, that its median should be."""

    what: str
    times: list[float]
    unit: str
    most: float | None = None

    @property
    def cells(self) -> dict[str, str]:
        """One line of the table."""
        scale, most = SCALES[self.unit], self.most
        low, middle, high = (scale * f(self.times) for f in (min, statistics.median, max))
        digits = 1 if self.unit == "ms" else 2
        return {
            "what": self.what,
            "median": f"{middle:.{digits}f} {self.unit}",
            "range": f"{low:.{digits}f} - {high:.{digits}f}",
            "target": "" if most is None else f"<= {most:g} {self.unit}",
            "met": "" if most is None else "yes" if middle <= most else "no",
        }


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
    one = Question(
        cluster="dgx-h100",
        model="gpt3-175b",
        strategy=strategy,
        overrides={"nodes": "128"},
        tp=8,
        pp=8,
        accumulation=micro_steps,
    )
    return lambda: run(one)


def case(strategy: str, gpus: int = 128, bandwidth: float = CLUSTER.inter.bandwidth) -> Question:
    """The 7B model (32 layers and embedding and head) on nodes of 8 A100."""
    cluster = replace(CLUSTER, inter=replace(CLUSTER.inter, bandwidth=bandwidth))
    return Question(cluster=cluster, model=MODEL, strategy=strategy, gpus=gpus)


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


def process(arguments: list[str], repeats: int) -> list[float]:
    """Seconds of a command, from start to end."""
    return timed(lambda: subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL), repeats)


def unfolded(strategy: str, gpus: int) -> None:
    """A step with jitter, in which no rank stands for others: prints seconds and peak GiB."""
    job = Question(
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


def question(**batch: Any) -> Callable[[], object]:
    """What answers a question on 64 H100, each time with another bandwidth."""
    speeds = cycle(f"{400 + more} Gbit/s" for more in range(100))
    case = ("dgx-h100", "llama-7b", "zero2")
    return lambda: simulate(*case, gpus=64, overrides={"inter.bandwidth": next(speeds)}, **batch)


def measurements(*, quick: bool) -> Iterator[SpeedLine]:
    """All of them; `quick`: once each."""
    few, many = (1, 1) if quick else (10, 30)
    loop = timed(lambda: sum(range(10**7)), many)
    yield SpeedLine("sum of 10 million numbers, to compare machines", loop, "ms")
    for what, batch, most in (("given", GIVEN, 8), ("chosen", {}, 25)):
        times = timed(question(**batch), many)
        yield SpeedLine(f"`zero2`, 7B, 64 H100, batch {what}", times, "ms", most)
    for name in FOLDED:
        yield SpeedLine(f"`{name}`, 7B, 128 GPUs", timed(runs(name), many), "ms", 4)
    yield SpeedLine(f"`{CO2}`, 7B, 128 GPUs", timed(runs(CO2), few), "ms", 30)
    new = timed(new_schedules("zeropp"), few)
    yield SpeedLine("`zeropp`, 7B, 128 GPUs, with a new schedule", new, "ms", 10)
    for name in DEEP:
        what = f"`{name}`, 175B in 8 stages, 512 micro-steps"
        yield SpeedLine(what, timed(deep(name), few), "s", 1)
    sizes = {gpus: timed(runs("zero3", gpus), many) for gpus in (128, 1024, LARGE)}
    for gpus, times in sizes.items():
        ratio = statistics.median(times) / statistics.median(sizes[128])
        yield SpeedLine(f"`zero3`, {gpus} GPUs ({ratio:.2f} x 128)", times, "ms")
    for name in JITTERED:
        for gpus, limit in ((64, 1),) if quick else ((512, 1), (LARGE, 3)):
            alone = [sys.executable, __file__, "--unfolded", name, str(gpus)]
            large = [json.loads(subprocess.check_output(alone)) for _ in range(1 if quick else 3)]
            memory = max(step["gib"] for step in large)
            what = f"`{name}` step, {gpus} GPUs with jitter ({memory:.2f} GiB)"
            yield SpeedLine(what, [step["seconds"] for step in large], "s", limit)
    command = str(Path(sys.executable).with_name("co2sim"))
    shell = [command, "run", "-c", "a100-tcp80", "-m", "llama-7b", "-s", "zero3"]
    yield SpeedLine("`co2sim run` from the shell", process(shell, few), "s", 0.8)
    yield SpeedLine("`co2sim --help`", process([command, "--help"], few), "s", 0.3)
    uneven = ["run", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "co2.published:tau=48"]
    for option in UNEVEN:
        times = process([command, *uneven, "-g", "96", *option], min(few, 3))
        yield SpeedLine(f"`{' '.join(['co2sim', *uneven, '-g 96', *option])}`", times, "s", 3)


def main() -> None:
    """Measure everything and print the table."""
    command = parser(__doc__, "every measurement once, 64 GPUs unfolded")
    step = ("STRATEGY", "GPUS")
    command.add_argument("--unfolded", nargs=2, metavar=step, help="only a step with jitter")
    options = command.parse_args()
    if options.unfolded:
        unfolded(options.unfolded[0], int(options.unfolded[1]))
        return
    rows = [line.cells for line in measurements(quick=options.quick)]
    text = f"# How fast the simulator is\n\n{machine()}\n\n{table(rows)}\n\n{made_by()}\n"
    if options.out:
        with folder(options) as out:
            (out / "speed.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
