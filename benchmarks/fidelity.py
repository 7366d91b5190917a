"""How true predictions are: every strategy in the lab, predicted first, then measured.

    sudo python benchmarks/fidelity.py sleep        # 90 configurations, about half an hour
    sudo python benchmarks/fidelity.py flops        # real matrix products
    sudo python benchmarks/fidelity.py hiding       # CO2 beside blocking strategies
    sudo python benchmarks/fidelity.py sleep --quick    # one lab, two strategies

`sleep` predicts twice: from the stated rate of the lab alone, and from a probe in the same lab just
before. `flops` predicts from the probe. Nothing is fitted to what is compared. Writes
fidelity-KIND.csv and fidelity-KIND.md, after every lab.
"""

import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from reports import folder, machine, made_by, parser, table

from co2sim import Case, run
from realrun.launch.lab import Lab, stated_cluster
from realrun.record import folder_name

LabRow: TypeAlias = dict[str, Any]

MODELS = ("tiny-5m", "tiny-23m")
LAYOUTS = ((2, 1), (4, 1), (2, 2))
RATES = ("300 Mbit/s", "1 Gbit/s", "3 Gbit/s")
STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zeropp",
    "local_sgd:tau=4",
    "overlap_local_sgd:tau=4",
    "slowmo:tau=4",
    "diloco:tau=4,dtype=int4",
    "co2:tau=4",
)
BY_NODE = {"local_sgd:tau=4": "local_sgd:tau=4,worker=node", "co2:tau=4": "co2:tau=4,worker=node"}
"""On nodes of several ranks these run with one worker per node."""

SHORT_PROBE = ("--budget", "2 s", "--max-size", "1 MiB")
"""For a trial; too short to predict well."""


@dataclass(frozen=True, slots=True)
class LabJob:
    """A lab, and what runs there."""

    lab: Lab
    model: str
    strategies: tuple[str, ...]


def sleep_jobs() -> Iterator[LabJob]:
    """All strategies in all labs; the two models take turns."""
    for number, ((nodes, per_node), rate) in enumerate(itertools.product(LAYOUTS, RATES)):
        for which, model in enumerate(MODELS):
            chosen = STRATEGIES[(number + which) % 2 :: 2]
            named = tuple(BY_NODE.get(s, s) if per_node > 1 else s for s in chosen)
            yield LabJob(Lab(nodes, per_node, rate), model, named)


def flops_jobs() -> Iterator[LabJob]:
    """Two ranks, so that each has a core to itself."""
    for number, rate in enumerate(RATES):
        yield LabJob(Lab(2, 1, rate), "tiny-5m", STRATEGIES[number % 2 :: 2])


def hiding_jobs() -> Iterator[LabJob]:
    """Enough local steps to hide an average of 0.9 s, and the same without hiding."""
    yield LabJob(Lab(4, 1, "300 Mbit/s"), "tiny-5m", ("co2:tau=8", "local_sgd:tau=8", "ddp"))


def quick_jobs() -> Iterator[LabJob]:
    """One small lab."""
    yield LabJob(Lab(2, 1, "3 Gbit/s"), "tiny-5m", ("ddp", "co2:tau=4"))


JOBS = {"sleep": sleep_jobs, "flops": flops_jobs, "hiding": hiding_jobs}


def realrun(lab: Lab, *arguments: str) -> None:
    """Run a command as the ranks of a lab."""
    build = ("--nodes", str(lab.nodes), "--gpus-per-node", str(lab.gpus_per_node))
    inside = [*("lab", "run", *build, "--rate", lab.rate), "--", "realrun", *arguments]
    subprocess.run([sys.executable, "-m", "realrun", *inside], check=True, stdout=sys.stderr)


def measured(job: LabJob, kernels: str, clusters: dict[str, Path], rounds: int) -> list[LabRow]:
    """Predict from every cluster file, run, and lay side by side.

    With `rounds` 0 about five seconds of the median strategy are measured, in 3 to 30 rounds: one
    late wake-up weighs less where rounds are short.
    """
    options: dict[str, Any] = {"precision": "fp32"} if kernels == "flops" else {}
    predictions = {
        source: [
            run(Case(cluster=str(path), model=job.model, strategy=text, **options))
            for text in job.strategies
        ]
        for source, path in clusters.items()
    }
    usual = statistics.median(found.round_time_s for found in next(iter(predictions.values())))
    rounds = rounds or min(max(3, math.ceil(5.0 / usual)), 30)
    with tempfile.TemporaryDirectory() as folder:
        first = str(next(iter(clusters.values())))
        arguments = ["run", "-c", first, "-m", job.model, "--kernels", kernels]
        arguments += [item for text in job.strategies for item in ("-s", text)]
        arguments += ["--rounds", str(rounds), "--out", folder, "--json"]
        arguments += [item for pair in options.items() for item in (f"--{pair[0]}", pair[1])]
        realrun(job.lab, *arguments)
        found = [
            json.loads((Path(folder) / folder_name(text) / "run.json").read_text())["figures"]
            for text in job.strategies
        ]
    lab, rows = job.lab, []
    for number, seen in enumerate(found):
        row: LabRow = {
            "nodes": lab.nodes,
            "gpus_per_node": lab.gpus_per_node,
            "rate": lab.rate,
            "model": job.model,
            "strategy": seen["strategy"],
            "measured_s": seen["round_time_s"],
            "measured_exposed_s": seen["exposed_comm_s"],
            "measured_overlap": seen["overlap_ratio"],
        }
        for source, results in predictions.items():
            result = results[number]
            row[f"{source}_s"] = result.round_time_s
            row[f"{source}_error"] = result.round_time_s / seen["round_time_s"] - 1
            row[f"{source}_exposed_s"] = result.exposed_comm_s
            row[f"{source}_overlap"] = result.overlap_ratio
        rows.append(row)
    return rows


def summary(frame: pd.DataFrame, source: str) -> str:
    """Errors of the predictions from one source, in words."""
    errors = frame[f"{source}_error"].abs()
    overlap = (frame[f"{source}_overlap"] - frame["measured_overlap"]).abs()
    words = {"stated": "the stated rate", "probed": "a probe just before"}[source]
    return (
        f"Predicted from {words}: round time, median absolute error {errors.median():.1%}, largest"
        f" {errors.max():.1%}; overlap ratio, median difference {overlap.median():.3f}, largest"
        f" {overlap.max():.3f}."
    )


def report(rows: Sequence[LabRow], kernels: str) -> str:
    """The table and its summary, in Markdown."""
    frame = pd.DataFrame(rows)
    sources = [name for name in ("stated", "probed") if f"{name}_s" in frame]
    words = "\n\n".join(summary(frame, source) for source in sources)
    return f"""\
# Predicted and measured in the lab, {kernels} kernels

{len(rows)} configurations, predicted before they ran. {machine()}

{words}

{table([_cells(row, sources) for row in rows])}

{made_by()}
"""


def _cells(row: LabRow, sources: Sequence[str]) -> dict[str, str]:
    cells = {
        "nodes x ranks": f"{row['nodes']} x {row['gpus_per_node']}",
        "rate": row["rate"],
        "model": row["model"],
        "strategy": f"`{row['strategy']}`",
        "measured ms": f"{row['measured_s'] * 1e3:.1f}",
        "exposed ms": f"{row['measured_exposed_s'] * 1e3:.1f}",
        "overlap": f"{row['measured_overlap']:.3f}",
    }
    for source in sources:
        cells |= {
            f"{source}: ms": f"{row[f'{source}_s'] * 1e3:.1f}",
            f"{source}: error": f"{row[f'{source}_error']:+.1%}",
            f"{source}: exposed ms": f"{row[f'{source}_exposed_s'] * 1e3:.1f}",
            f"{source}: overlap": f"{row[f'{source}_overlap']:.3f}",
        }
    return cells


def in_lab(
    lab: Lab, jobs: Sequence[LabJob], kernels: str, rounds: int, name: str, *, quick: bool
) -> list[LabRow]:
    """Probe a lab, then predict and measure all of its jobs."""
    rows: list[LabRow] = []
    with tempfile.TemporaryDirectory() as place:
        probed, stated = Path(place) / "probed.toml", Path(place) / "stated.toml"
        stated.write_text(stated_cluster(lab))
        virtual = ("--gpu", "virtual") if kernels == "sleep" else ()
        realrun(lab, "probe", *(SHORT_PROBE if quick else ()), "--out", str(probed), *virtual)
        clusters = {"stated": stated} if kernels == "sleep" else {}
        clusters["probed"] = probed
        for job in jobs:
            found = measured(job, kernels, clusters, rounds)
            rows += found
            for row in found:
                errors = [f"{source} {row[f'{source}_error']:+.1%}" for source in clusters]
                print(f"{name} {job.model} {row['strategy']}: {', '.join(errors)}")
    return rows


def main() -> None:
    """Run all jobs of a kind, and keep what was seen after each lab."""
    command = parser(__doc__, "a short probe and two strategies in one lab, two rounds")
    command.add_argument("kind", choices=JOBS)
    command.add_argument("--rounds", type=int, default=0, help="measured rounds (0: by length)")
    command.add_argument("--only", default="", help="only labs such as '4x1@3 Gbit/s'")
    given = command.parse_args()
    jobs = quick_jobs() if given.quick else JOBS[given.kind]()
    rounds = 2 if given.quick else given.rounds
    kernels = "flops" if given.kind == "flops" else "sleep"
    rows: list[LabRow] = []
    with folder(given) as out:
        for lab, group in itertools.groupby(jobs, key=lambda job: job.lab):
            name = f"{lab.nodes}x{lab.gpus_per_node}@{lab.rate}"
            if given.only not in name:
                continue
            rows += in_lab(lab, list(group), kernels, rounds, name, quick=given.quick)
            pd.DataFrame(rows).to_csv(out / f"fidelity-{given.kind}.csv", index=False)
            (out / f"fidelity-{given.kind}.md").write_text(report(rows, kernels))
    if given.quick:
        print(report(rows, kernels))


if __name__ == "__main__":
    main()
