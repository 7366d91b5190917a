"""How true predictions are: every strategy in the lab, predicted first, then measured.

    sudo python benchmarks/fidelity.py sleep        # 90 configurations, about half an hour
    sudo python benchmarks/fidelity.py flops        # real matrix products
    sudo python benchmarks/fidelity.py hiding       # CO2 beside blocking strategies

`sleep` predicts twice: from the stated rate of the lab alone, and from a probe in the same lab just
before. `flops` predicts from the probe. Nothing is fitted to what is compared. Writes
fidelity-KIND.csv and fidelity-KIND.md, after every lab.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from co2sim import Case, run
from realrun.launch.lab import Lab, stated_cluster
from realrun.record import folder_name

Row: TypeAlias = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
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


@dataclass(frozen=True, slots=True)
class Setting:
    """A lab, and what runs there."""

    lab: Lab
    model: str
    strategies: tuple[str, ...]


def sleep_settings() -> Iterator[Setting]:
    """All strategies in all labs; the two models take turns."""
    for number, ((nodes, per_node), rate) in enumerate(itertools.product(LAYOUTS, RATES)):
        for which, model in enumerate(MODELS):
            chosen = STRATEGIES[(number + which) % 2 :: 2]
            named = tuple(BY_NODE.get(s, s) if per_node > 1 else s for s in chosen)
            yield Setting(Lab(nodes, per_node, rate), model, named)


def flops_settings() -> Iterator[Setting]:
    """Two ranks, so that each has a core to itself."""
    for number, rate in enumerate(RATES):
        yield Setting(Lab(2, 1, rate), "tiny-5m", STRATEGIES[number % 2 :: 2])


def hiding_settings() -> Iterator[Setting]:
    """Enough local steps to hide an average of 0.9 s, and the same without hiding."""
    yield Setting(Lab(4, 1, "300 Mbit/s"), "tiny-5m", ("co2:tau=8", "local_sgd:tau=8", "ddp"))


SETTINGS = {"sleep": sleep_settings, "flops": flops_settings, "hiding": hiding_settings}


def realrun(lab: Lab, *arguments: str) -> None:
    """Run a command as the ranks of a lab."""
    build = ("--nodes", str(lab.nodes), "--gpus-per-node", str(lab.gpus_per_node))
    inside = [*("lab", "run", *build, "--rate", lab.rate), "--", "realrun", *arguments]
    subprocess.run([sys.executable, "-m", "realrun", *inside], check=True, stdout=sys.stderr)


def measured(setting: Setting, kernels: str, clusters: dict[str, Path], rounds: int) -> list[Row]:
    """Predict from every cluster file, run, and lay side by side.

    With `rounds` 0 about five seconds of the median strategy are measured, in 3 to 30 rounds: one
    late wake-up weighs less where rounds are short.
    """
    options: dict[str, Any] = {"precision": "fp32"} if kernels == "flops" else {}
    predictions = {
        source: [
            run(Case(cluster=str(path), model=setting.model, strategy=text, **options))
            for text in setting.strategies
        ]
        for source, path in clusters.items()
    }
    usual = statistics.median(found.round_time_s for found in next(iter(predictions.values())))
    rounds = rounds or min(max(3, math.ceil(5.0 / usual)), 30)
    with tempfile.TemporaryDirectory() as folder:
        first = str(next(iter(clusters.values())))
        arguments = ["run", "-c", first, "-m", setting.model, "--kernels", kernels]
        arguments += [item for text in setting.strategies for item in ("-s", text)]
        arguments += ["--rounds", str(rounds), "--out", folder, "--json"]
        arguments += [item for pair in options.items() for item in (f"--{pair[0]}", pair[1])]
        realrun(setting.lab, *arguments)
        found = [
            json.loads((Path(folder) / folder_name(text) / "run.json").read_text())["figures"]
            for text in setting.strategies
        ]
    lab, rows = setting.lab, []
    for number, seen in enumerate(found):
        row: Row = {
            "nodes": lab.nodes,
            "gpus_per_node": lab.gpus_per_node,
            "rate": lab.rate,
            "model": setting.model,
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


def report(rows: Sequence[Row], kernels: str) -> str:
    """The table and its summary, in Markdown."""
    frame = pd.DataFrame(rows)
    sources = [name for name in ("stated", "probed") if f"{name}_s" in frame]
    head = ["nodes x ranks", "rate", "model", "strategy", "measured ms", "exposed ms", "overlap"]
    for source in sources:
        head += [f"{source}: ms", "error", "exposed ms", "overlap"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = [
            f"{r['nodes']} x {r['gpus_per_node']}",
            r["rate"],
            r["model"],
            f"`{r['strategy']}`",
            f"{r['measured_s'] * 1e3:.1f}",
            f"{r['measured_exposed_s'] * 1e3:.1f}",
            f"{r['measured_overlap']:.3f}",
        ]
        for source in sources:
            cells += [
                f"{r[f'{source}_s'] * 1e3:.1f}",
                f"{r[f'{source}_error']:+.1%}",
                f"{r[f'{source}_exposed_s'] * 1e3:.1f}",
                f"{r[f'{source}_overlap']:.3f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    words = "\n\n".join(summary(frame, source) for source in sources)
    table = "\n".join(lines)
    return (
        f"# Predicted and measured in the lab, {kernels} kernels\n\n{len(rows)} configurations,"
        f" predicted before they ran. {machine()}\n\n{words}\n\n{table}\n"
    )


def machine() -> str:
    """What this ran on."""
    names = Path("/proc/cpuinfo").read_text().split("model name\t: ")[1:2]
    cpu = names[0].splitlines()[0] if names else platform.processor()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    import torch  # noqa: PLC0415

    return (
        f"Machine: {cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()},"
        f" Python {platform.python_version()}, torch {torch.__version__}."
    )


def main() -> None:
    """Run all settings of a kind, and keep what was seen after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds (0: by length)")
    parser.add_argument("--only", default="", help="only labs such as '4x1@3 Gbit/s'")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    settings = SETTINGS[given.kind]()
    kernels = "flops" if given.kind == "flops" else "sleep"
    rows: list[Row] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for lab, group in itertools.groupby(settings, key=lambda setting: setting.lab):
        name = f"{lab.nodes}x{lab.gpus_per_node}@{lab.rate}"
        if given.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            probed, stated = Path(folder) / "probed.toml", Path(folder) / "stated.toml"
            stated.write_text(stated_cluster(lab))
            virtual = ("--gpu", "virtual") if kernels == "sleep" else ()
            realrun(lab, "probe", "--out", str(probed), *virtual)
            clusters = {"probed": probed}
            if kernels == "sleep":
                clusters = {"stated": stated, "probed": probed}
            for setting in group:
                rows += measured(setting, kernels, clusters, given.rounds)
                for row in rows[-len(setting.strategies) :]:
                    errors = [f"{source} {row[f'{source}_error']:+.1%}" for source in clusters]
                    print(f"{name} {setting.model} {row['strategy']}: {', '.join(errors)}")
        pd.DataFrame(rows).to_csv(given.out / f"fidelity-{given.kind}.csv", index=False)
        (given.out / f"fidelity-{given.kind}.md").write_text(report(rows, kernels))


if __name__ == "__main__":
    main()
