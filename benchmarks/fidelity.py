"""How true predictions are: every strategy in the lab, predicted first, then measured.

    sudo python benchmarks/fidelity.py sleep        # 90 configurations, about half an hour
    sudo python benchmarks/fidelity.py flops        # real matrix products, from a probe

`sleep` predicts from the stated rate of the lab alone; `flops` from a probe in the same lab just
before. Nothing is fitted to what is compared. Writes benchmarks/results/fidelity-KIND.csv and .md.
"""

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from co2sim import Case, run
from realrun.lab import Lab, stated_cluster
from realrun.record import folder_name

RESULTS = Path(__file__).parent / "results"
MODELS = ("tiny-5m", "tiny-20m")
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


def realrun(lab: Lab, *arguments: str) -> None:
    """Run a command as the ranks of a lab."""
    build = ("--nodes", str(lab.nodes), "--gpus-per-node", str(lab.gpus_per_node))
    inside = [*("lab", "run", *build, "--rate", lab.rate), "--", "realrun", *arguments]
    subprocess.run([sys.executable, "-m", "realrun", *inside], check=True, stdout=sys.stderr)


def measured(setting: Setting, kernels: str, cluster: Path, rounds: int) -> list[dict[str, Any]]:
    """Predict, run and lay side by side."""
    options: dict[str, Any] = {"precision": "fp32"} if kernels == "flops" else {}
    batch = "1"
    cases = [
        Case(cluster=str(cluster), model=setting.model, strategy=text, **options)
        for text in setting.strategies
    ]
    predictions = [run(case) for case in cases]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["run", "-c", str(cluster), "-m", setting.model, "--kernels", kernels]
        arguments += [item for text in setting.strategies for item in ("-s", text)]
        arguments += ["--rounds", str(rounds), "--micro-batch", batch, "--out", folder]
        arguments += [item for pair in options.items() for item in (f"--{pair[0]}", pair[1])]
        realrun(setting.lab, *arguments)
        found = [
            json.loads((Path(folder) / folder_name(str(c.strategy)) / "run.json").read_text())
            for c in cases
        ]
    lab = setting.lab
    return [
        {
            "nodes": lab.nodes,
            "gpus_per_node": lab.gpus_per_node,
            "rate": lab.rate,
            "model": setting.model,
            "strategy": predicted.strategy,
            "predicted_s": predicted.round_time_s,
            "measured_s": seen["figures"]["round_time_s"],
            "error": predicted.round_time_s / seen["figures"]["round_time_s"] - 1,
            "predicted_exposed_s": predicted.exposed_comm_s,
            "measured_exposed_s": seen["figures"]["exposed_comm_s"],
            "predicted_overlap": predicted.overlap_ratio,
            "measured_overlap": seen["figures"]["overlap_ratio"],
        }
        for predicted, seen in zip(predictions, found, strict=True)
    ]


def report(rows: Sequence[dict[str, Any]], kernels: str) -> str:
    """The table and its summary, in Markdown."""
    frame = pd.DataFrame(rows)
    errors = frame["error"].abs()
    overlap = (frame["predicted_overlap"] - frame["measured_overlap"]).abs()
    table = "\n".join(
        f"| {r['nodes']} x {r['gpus_per_node']} | {r['rate']} | {r['model']} | `{r['strategy']}` |"
        f" {r['predicted_s'] * 1e3:.1f} | {r['measured_s'] * 1e3:.1f} | {r['error']:+.1%} |"
        f" {r['predicted_exposed_s'] * 1e3:.1f} | {r['measured_exposed_s'] * 1e3:.1f} |"
        f" {r['predicted_overlap']:.3f} | {r['measured_overlap']:.3f} |"
        for r in rows
    )
    source = {"sleep": "the stated rate", "flops": "a probe in the same lab just before"}[kernels]
    return f"""# Predicted and measured in the lab, {kernels} kernels

Predicted from {source}, before the run. {machine()}

{len(rows)} configurations. Round time: median absolute error {errors.median():.1%}, largest
{errors.max():.1%}. Overlap ratio: largest difference {overlap.max():.3f}, median
{overlap.median():.3f}.

| nodes x ranks | rate | model | strategy | predicted ms | measured ms | error | exposed, predicted | measured | overlap, predicted | measured |
|---|---|---|---|---|---|---|---|---|---|---|
{table}
"""


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", choices=("sleep", "flops"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", default="", help="only labs such as 4x1@3 Gbit/s")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    settings = list(sleep_settings() if given.kernels == "sleep" else flops_settings())
    rows: list[dict[str, Any]] = []
    given.out.mkdir(parents=True, exist_ok=True)
    for number, setting in enumerate(settings):
        lab = setting.lab
        name = f"{lab.nodes}x{lab.gpus_per_node}@{lab.rate}"
        if given.only not in name:
            continue
        print(f"{number + 1} of {len(settings)}: {name} {setting.model}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            cluster = Path(folder) / "cluster.toml"
            if given.kernels == "sleep":
                cluster.write_text(stated_cluster(lab))
            else:
                realrun(lab, "probe", "--out", str(cluster))
            rows += measured(setting, given.kernels, cluster, given.rounds)
        for row in rows[-len(setting.strategies) :]:
            print(f"  {row['strategy']:40} {row['error']:+.1%}", file=sys.stderr)
        pd.DataFrame(rows).to_csv(given.out / f"fidelity-{given.kernels}.csv", index=False)
        (given.out / f"fidelity-{given.kernels}.md").write_text(report(rows, given.kernels))
    print(report(rows, given.kernels))


if __name__ == "__main__":
    main()
