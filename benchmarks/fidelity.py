"""How true predictions are: every strategy in the lab, predicted first, then measured.

    sudo python benchmarks/fidelity.py sleep        # 90 configurations, about 40 minutes
    sudo python benchmarks/fidelity.py flops        # real matrix products
    sudo python benchmarks/fidelity.py hiding       # CO2 beside blocking strategies
    sudo python benchmarks/fidelity.py sites        # two sites with a slow link between
    sudo python benchmarks/fidelity.py leaves       # two leaves with a narrow spine between
    sudo python benchmarks/fidelity.py invented --seed 7 --labs 8   # 16 new ones
    sudo python benchmarks/fidelity.py sleep --quick    # one lab, two strategies

`sleep` predicts twice, from what was measured in the same lab just before: from its stated rates
and latencies that take 20 s to measure, and from a whole probe. `flops` predicts from the probe,
and afterwards at the speed that products had in the run. `sites` and `leaves` predict the links of
these from their rates. `invented` draws labs, models and options from the seed. Nothing else is
taken from a run. Writes fidelity-KIND.csv and .md.
"""

import argparse
import itertools
import math
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from reports import folder, machine, made_by, parser, table

from co2sim import Question, run
from co2sim.catalog import load_cluster
from co2sim.prediction.result import Result
from realrun.execute.matmul_speed import at_speed, beside
from realrun.lab.lab import Lab
from realrun.lab.time_dilation import SLEEPING, chosen
from realrun.launch.launcher import cores
from realrun.record import Record, folder_name, read

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
    "co2.published:tau=4",
)
BY_NODE = {
    "local_sgd:tau=4": "local_sgd:tau=4,worker=node",
    "co2.published:tau=4": "co2.published:tau=4,worker=node",
}
"""On nodes of several ranks these run with one worker per node."""


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


SITES = (
    "co2.published:tau=8,worker=site",
    "co2:tau=8,delay=4,worker=site,inner=fsdp",
    "diloco:tau=8,worker=site,inner=zero3",
    "diloco:tau=8,fragments=4,delay=2,worker=site,inner=fsdp",
    "local_sgd:tau=8,worker=site,inner=ddp",
    "co2.published:tau=8",
    "zero2",
)
"""With a site, or a GPU, as the worker, and one strategy over both sites."""

LEAVES = ("ddp", "zero3", "co2.published:tau=4")

QUICK = [LabJob(Lab(2, 1, "3 Gbit/s"), "tiny-5m", ("ddp", "co2.published:tau=4"))]
JOBS = {
    "sleep": list(sleep_jobs()),
    # Two ranks, so that each has a core to itself.
    "flops": [
        LabJob(Lab(2, 1, rate), "tiny-5m", STRATEGIES[number % 2 :: 2])
        for number, rate in enumerate(RATES)
    ],
    # Enough local steps to hide an average of 0.9 s, and the same without hiding.
    "hiding": [
        LabJob(
            Lab(4, 1, "300 Mbit/s"), "tiny-5m", ("co2.published:tau=8", "local_sgd:tau=8", "ddp")
        )
    ],
    # Two sites of two nodes, at two rates between them.
    "sites": [
        LabJob(Lab(4, 1, "1 Gbit/s", sites=2, wan=wan), "tiny-5m", SITES)
        for wan in ("50 Mbit/s", "200 Mbit/s")
    ],
    # Two leaves of two nodes; and in turns, so that neighbours never share one.
    "leaves": [
        LabJob(Lab(4, 1, "1 Gbit/s", leaf=2, oversubscription=o, placement=p), "tiny-5m", LEAVES)
        for o, p in ((1.0, "packed"), (4.0, "packed"), (4.0, "cyclic"))
    ],
}

INVENTED = (
    "ddp:bucket_mib={bucket}",
    "zero1",
    "zero2",
    "zero3",
    "zero3:gathers=2",
    "zeropp",
    "zeropp:qwz=false",
    "zeropp:hpz=false",
    "local_sgd:tau={tau}",
    "overlap_local_sgd:tau={tau}",
    "diloco:tau={tau},dtype=int8",
    "diloco:tau={tau},fragments=2,delay=1",
    "co2.published:tau={tau}",
    "co2.published:tau={tau},dtype=int8",
)


def invented_jobs(seed: int, labs: int, models: Path) -> Iterator[LabJob]:
    """Two strategies in every lab, all of it drawn; the models are written to a folder."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(labs):
        nodes, per_node = draw.choice(((2, 1), (3, 1), (4, 1), (2, 2)))
        rate = round(math.exp(draw.uniform(math.log(250), math.log(2200))))
        layers, width, ffn = draw.randint(2, 8), 64 * draw.randint(2, 8), draw.choice((2, 3, 4))
        vocabulary, length = 512 * draw.randint(2, 20), 256 * draw.randint(1, 8)
        path = models / f"{layers}x{width}x{ffn}-v{vocabulary}-s{length}.toml"
        path.write_text(
            f'name = "{path.stem}"\nkind = "transformer"\nsource = "drawn from a seed"\n'
            f"layers = {layers}\nhidden = {width}\nheads = 4\nffn = {ffn * width}\n"
            'gated = false\nbias = false\nnorm = "layernorm"\ntied = true\n'
            f"vocab = {vocabulary}\nseq_len = {length}\n"
        )
        chosen = (
            text.format(bucket=draw.choice((0.5, 2, 8)), tau=draw.randint(2, 6))
            for text in draw.sample(INVENTED, 2)
        )
        yield LabJob(Lab(nodes, per_node, f"{rate} Mbit/s"), str(path), tuple(chosen))


LabRow: TypeAlias = dict[str, Any]

HIDDEN = 0.01
"""Fraction of its busy time below which communication counts as hidden."""

SOURCES = {
    "stated": "the stated rate, and latencies measured just before",
    "probed": "a probe just before",
    "at_speed": "that probe, and afterwards from the speed of matrix products in the run itself",
}
"""What predictions are made from."""

SHORT_PROBE = ("--budget", "2 s", "--max-size", "1 MiB")
"""For a trial; too short to predict well."""


def as_ranks(lab: Lab, *command: str) -> None:
    """Run a command as the ranks of a lab."""
    inside = ["lab", "run", *lab.arguments, "--", *command]
    subprocess.run([sys.executable, "-m", "realrun", *inside], check=True, stdout=sys.stderr)


def measured(job: LabJob, kernels: str, clusters: dict[str, Path], *, quick: bool) -> list[LabRow]:
    """Predict from every cluster file, run, and lay side by side.

    The median strategy is measured for about eight seconds of the machine, in 3 to 100 rounds: a
    late wake-up weighs less where rounds are many.
    """
    options = {"precision": "fp32"} if kernels == "flops" else {}
    beyond = {
        source: job.lab.beyond(load_cluster(str(path)).value.inter.latency)
        for source, path in clusters.items()
    }
    predictions = {
        source: [
            run(
                Question(
                    cluster=str(path),
                    model=job.model,
                    strategy=text,
                    overrides=beyond[source],
                    **options,
                )
            )
            for text in job.strategies
        ]
        for source, path in clusters.items()
    }
    usual = statistics.median(found.round_time_s for found in next(iter(predictions.values())))
    rounds = 2 if quick else min(max(3, math.ceil(8.0 / (job.lab.dilation * usual))), 100)
    with tempfile.TemporaryDirectory() as folder:
        source, first = next(iter(clusters.items()))
        arguments = ["run", "-c", str(first), "-m", job.model, "--kernels", kernels]
        arguments += [item for text in job.strategies for item in ("-s", text)]
        arguments += [word for pair in beyond[source].items() for word in ("--set", "=".join(pair))]
        arguments += ["--rounds", str(rounds), "--out", folder, "--json"]
        arguments += [item for pair in options.items() for item in (f"--{pair[0]}", pair[1])]
        as_ranks(job.lab, "realrun", *arguments)
        found = [read(Path(folder) / folder_name(text)) for text in job.strategies]
    return [
        _row(job, record, {source: results[number] for source, results in predictions.items()})
        for number, record in enumerate(found)
    ]


def _row(job: LabJob, record: Record, predicted: dict[str, Result]) -> LabRow:
    """What was seen, beside what each source predicted, and what at the speed of the run."""
    lab, seen = job.lab, record.figures
    row: LabRow = {
        "nodes": lab.nodes,
        "gpus_per_node": lab.gpus_per_node,
        "rate": lab.rate + _beyond(lab),
        "model": Path(job.model).stem,
        "strategy": seen["strategy"],
        "measured_s": seen["round_time_s"],
        "measured_busy_s": seen["comm_busy_s"],
        "measured_exposed_s": seen["exposed_comm_s"],
        "measured_overlap": seen["overlap_ratio"],
    }
    if record.product_speed is not None:
        gpu = record.case.load()[0].value.gpu
        row["speed"] = beside(record.product_speed, gpu, record.case.precision or "fp32")
        predicted["at_speed"] = run(at_speed(record.case, record.product_speed))
    for source, result in predicted.items():
        row[f"{source}_s"] = result.round_time_s
        row[f"{source}_busy_s"] = result.comm_busy_s
        row[f"{source}_busy_error"] = result.comm_busy_s / seen["comm_busy_s"] - 1
        row[f"{source}_error"] = result.round_time_s / seen["round_time_s"] - 1
        row[f"{source}_exposed_s"] = result.exposed_comm_s
        row[f"{source}_overlap"] = result.overlap_ratio
    return row


def _beyond(lab: Lab) -> str:
    """What is said of sites or leaves behind the rate."""
    if lab.wan:
        return f", {lab.wan} between sites"
    return f", leaves of {lab.leaf}, {lab.oversubscription:g}:1, {lab.placement}" * bool(lab.leaf)


def summary(frame: pd.DataFrame, source: str) -> str:
    """Errors of the predictions from one source, as a text: communication first."""
    busy, rounds = frame[f"{source}_busy_error"].abs(), frame[f"{source}_error"].abs()
    apart = frame[f"{source}_exposed_s"] - frame["measured_exposed_s"]
    exposed = (apart / frame["measured_exposed_s"])[
        frame["measured_exposed_s"] >= HIDDEN * frame["measured_busy_s"]
    ].abs()
    overlap = (frame[f"{source}_overlap"] - frame["measured_overlap"]).abs()
    return (
        f"Predicted from {SOURCES[source]}, median and largest absolute error:"
        f" communication busy time {busy.median():.1%} and {busy.max():.1%};"
        f" exposed communication {exposed.median():.1%} and {exposed.max():.1%}"
        f" (of {len(exposed)} that exposed any); overlap ratio {overlap.median():.3f} and"
        f" {overlap.max():.3f}; round time {rounds.median():.1%} and {rounds.max():.1%}."
    )


def report(rows: Sequence[LabRow], kernels: str) -> str:
    """The table and its summary, in Markdown."""
    frame = pd.DataFrame(rows)
    sources = [name for name in SOURCES if f"{name}_s" in frame]
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
        "busy ms": f"{row['measured_busy_s'] * 1e3:.1f}",
        "exposed ms": f"{row['measured_exposed_s'] * 1e3:.1f}",
        "overlap": f"{row['measured_overlap']:.3f}",
        "round ms": f"{row['measured_s'] * 1e3:.1f}",
    }
    if "speed" in row:
        cells["speed of the probe's"] = f"{row['speed']:.1%}"
    for source in sources:
        cells |= {
            f"{source}: busy": f"{row[f'{source}_busy_error']:+.1%}",
            f"{source}: exposed ms": f"{row[f'{source}_exposed_s'] * 1e3:.1f}",
            f"{source}: overlap": f"{row[f'{source}_overlap']:.3f}",
            f"{source}: round": f"{row[f'{source}_error']:+.1%}",
        }
    return cells


def in_lab(
    lab: Lab, jobs: Sequence[LabJob], kernels: str, name: str, *, probe: bool, quick: bool
) -> list[LabRow]:
    """Probe a lab, then predict and measure all of its jobs."""
    rows: list[LabRow] = []
    asks = (*SLEEPING, "--kernels", kernels)
    lab = replace(lab, dilation=chosen("auto", asks, lab.world_size, cores(), lab.sites))
    with tempfile.TemporaryDirectory() as place:
        probed, stated = Path(place) / "probed.toml", Path(place) / "stated.toml"
        virtual = ["--gpu", "virtual"] if kernels == "sleep" else []
        clusters = {}
        if kernels == "sleep":
            asked = ["--stated", "--out", str(stated), *virtual, *["--quick"] * quick]
            as_ranks(lab.one_switch, "realrun", "probe", *asked)
            clusters["stated"] = stated
        if probe:
            budget = SHORT_PROBE if quick else ()
            as_ranks(lab, "realrun", "probe", *budget, "--out", str(probed), *virtual)
            clusters["probed"] = probed
        for job in jobs:
            found = measured(replace(job, lab=lab), kernels, clusters, quick=quick)
            rows += found
            for row in found:
                errors = [
                    f"{source} busy {row[f'{source}_busy_error']:+.1%},"
                    f" round {row[f'{source}_error']:+.1%}"
                    for source in SOURCES
                    if f"{source}_s" in row
                ]
                print(f"{name} {row['model']} {row['strategy']}: {'; '.join(errors)}", flush=True)
    return rows


def jobs(options: argparse.Namespace, models: Path) -> Iterable[LabJob]:
    """What the command line asks for."""
    if options.quick:
        return QUICK
    if options.kind == "invented":
        return invented_jobs(options.seed, options.labs, models)
    return JOBS[options.kind]


def main() -> None:
    """Run all jobs of a kind, and keep what was seen after each lab."""
    command = parser(__doc__, "a short probe and two strategies in one lab, two rounds")
    command.add_argument("kind", choices=[*JOBS, "invented"])
    command.add_argument("--seed", type=int, default=0, help="of `invented`")
    command.add_argument("--labs", type=int, default=8, help="of `invented`, two strategies each")
    options = command.parse_args()
    kernels = "flops" if options.kind == "flops" else "sleep"
    rows: list[LabRow] = []
    with folder(options) as out, tempfile.TemporaryDirectory() as models:
        for lab, group in itertools.groupby(jobs(options, Path(models)), key=lambda job: job.lab):
            name = f"{lab.nodes}x{lab.gpus_per_node}@{lab.rate}{_beyond(lab)}"
            probe = options.kind not in {"invented", "sites", "leaves"}
            rows += in_lab(lab, list(group), kernels, name, probe=probe, quick=options.quick)
            pd.DataFrame(rows).to_csv(out / f"fidelity-{options.kind}.csv", index=False)
            (out / f"fidelity-{options.kind}.md").write_text(report(rows, kernels))
    if options.quick:
        print(report(rows, kernels))


if __name__ == "__main__":
    main()
