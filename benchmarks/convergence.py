"""How well every strategy learns from the same tokens: four workers, real text, tuned rates.

    python benchmarks/convergence.py            # about an hour on two cores; go on with the same
    python benchmarks/convergence.py --quick    # three configurations, too short to mean anything

Every configuration is tuned with a seed of its own on the final validation loss: the learning rate
on a grid of factors of 2, extended while the best is at its edge, then the outer step on a small
grid at that rate. The best is run with three other seeds. All runs share one launch of the ranks.

Each finished run is a row of convergence-runs.csv; what is there is not run again. Writes
convergence.csv, convergence.md and convergence.png, and from the runs the catalog's
step_factors.toml.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from reports import FOLDER, RESULTS, machine, made_by, png, publish, table
from studies import (
    CLIP,
    TUNING_SEED,
    Budget,
    Configuration,
    Rows,
    Study,
    Training,
    command,
    finished,
    trainings,
    tuned,
)

from co2sim.common.plots import COLOURS
from co2sim.strategies import LocalSteps, parse
from co2sim.strategies.local import round_steps
from co2sim.strategies.step import title
from realrun.train.log import MARKERS

RUNS = "convergence-runs.csv"
"""The file of finished runs."""


def configurations(*, quick: bool = False) -> list[Configuration]:
    """All lines of the table."""
    lines = [Configuration("AdamW-DDP", "ddp")]
    for tau in (3, 12, 48):
        for words, gap, clips in (
            ("plain", "constant", False),
            ("gap", "gap_aware", False),
            ("clip", "constant", True),
            ("gap + clip", "gap_aware", True),
        ):
            name = f"CO2 {tau}, {words}"
            lines.append(Configuration(name, f"co2.published:tau={tau}", {"gap": gap}, clips))
    alone = "co2:tau=1,delay=1,preview=true"
    lines.append(Configuration("CO2 delay 1, tau 1, preview", alone, momentum=0.0))
    short = ((12, 1, 12), (3, 1, 3), (2, 1, 2), (1, 1, 1))
    for tau, delay, parts in (*short, (12, 4, 1), (12, 4, 3), (12, 4, 12)):
        name = f"CO2 delay {delay}, tau {tau}" + (f", {parts} fragments" if parts > 1 else "")
        lines.append(Configuration(name, f"co2:tau={tau},delay={delay},fragments={parts}"))
    streamed = "diloco:tau=12,fragments=3,delay=4"
    lines.append(Configuration("Streaming DiLoCo delay 4, tau 12", streamed))
    for name, kind in (
        ("SlowMo 12", "slowmo"),
        ("DiLoCo 12", "diloco"),
        ("LocalSGD 12", "local_sgd"),
        ("OverlapLocalSGD 12", "overlap_local_sgd"),
    ):
        lines.append(Configuration(name, f"{kind}:tau=12"))
    few = {"CO2 12, gap + clip", "CO2 delay 4, tau 12", "DiLoCo 12"}
    return [line for line in lines if line.name in few or not quick]


def wanted(budget: Budget, rows: Rows) -> Iterator[Training]:
    """The runs of all configurations."""
    for configuration in configurations(quick=budget.quick):
        yield from tuned(configuration, budget, rows)


CURVES = ("AdamW-DDP", "LocalSGD 12", "SlowMo 12", "DiLoCo 12",
          "CO2 delay 1, tau 12, 12 fragments", "CO2 delay 4, tau 12")  # fmt: skip
"""Drawn over tokens, together with the best CO2 as published at tau 3 and at tau 12."""


def summary(budget: Budget, rows: Rows) -> pd.DataFrame:
    """A line for each configuration whose runs are all there."""
    lines = []
    for configuration in configurations(quick=budget.quick):
        runs = list(tuned(configuration, budget, rows))
        if any(run.key not in rows for run in runs):
            continue
        last = [rows[run.key] for run in runs if run.seed != TUNING_SEED]
        losses = [run.loss(rows) for run in runs if run.seed != TUNING_SEED]
        means = {name: mean(map(float, (row[name] for row in last)))
                 for name in ("accuracy", "penalty", "clipped")}  # fmt: skip
        lines.append(
            {
                "configuration": configuration.name,
                "loss": mean(losses),
                "spread": stdev(losses),
                "lowest": min(losses),
                "highest": max(losses),
                "accuracy": means["accuracy"],
                "seeds": len(last),
                "lr": float(last[0]["lr"]),
                "outer": last[0]["choice"] if configuration.keeps else last[0]["outer"],
                "penalty": means["penalty"],
                "clipped": means["clipped"],
                "tuning_runs": len(runs) - len(last),
                "curve": [json.loads(row["curve"]) for row in last],
            }
        )
    return pd.DataFrame(lines)


def report(frame: pd.DataFrame, budget: Budget, rows: Rows) -> str:
    """The table in Markdown."""
    facts = json.loads(next(row["facts"] for row in rows.values() if row["facts"]))
    base = frame.set_index("configuration")["loss"].get("AdamW-DDP", float("nan"))
    tokens = budget.steps * budget.batch * 64
    cells = [
        {
            "configuration": line["configuration"],
            "loss": f"{line['loss']:.4f} ± {line['spread']:.4f}",
            "above DDP": f"{line['loss'] - base:+.4f}",
            "accuracy": f"{line['accuracy']:.1%}",
            "lr": f"{line['lr']:g}",
            "outer step": line["outer"] or "-",
            "Λ": "-" if line["configuration"] == "AdamW-DDP" else f"{line['penalty']:.2f}",
            "clipped": "-" if line["configuration"] == "AdamW-DDP" else f"{line['clipped']:.1%}",
        }
        for _, line in frame.iterrows()
    ]
    return f"""\
# Convergence on real text

A GPT of {facts["parameters"]:,} parameters on the characters of Python {facts["python"]}'s\
 standard library (data {facts["sha256"][:12]}), {budget.workers} workers, {budget.steps} steps of\
 {budget.batch} x 64 characters ({tokens:,} in all), AdamW, {budget.warmup} steps of warm-up,\
 cosine to a tenth. {machine()}

*Loss* is the validation loss of the mean of the workers after the last step, in nats per\
 character: mean and standard deviation of {int(frame["seeds"].max())} seeds. Learning rate and\
 outer step were tuned for each line with another seed; with a delay what is kept was tuned, too.\
 For CO2 as published the mean of the workers is the anchor, which has not seen the last round: its\
 average is still under way. *Λ* is the mean penalty, *clipped* the share of elements of the\
 momentum that were clipped, at {CLIP} x lr x tau.

{table(cells)}

{made_by()} Every run is in convergence-runs.csv.
"""


def draw(figure: Figure, frame: pd.DataFrame) -> None:
    """Losses over tokens of some, and the last loss of all."""
    left, right = figure.subplots(1, 2)
    _curves(left, frame)
    _last(right, frame)


def _curves(axis: Axes, frame: pd.DataFrame) -> None:
    lines = frame.set_index("configuration")
    shown = [name for name in CURVES if name in lines.index]
    for tau in (3, 12):  # eight lines in all, as many as there are colours
        of_tau = [name for name in lines.index if name.startswith(f"CO2 {tau},")]
        if of_tau:
            shown.append(min(of_tau, key=lambda name: float(lines.loc[name, "loss"])))
    for index, name in enumerate(shown):
        curves = lines.loc[name, "curve"]
        tokens = [count for count, _ in curves[0]]
        losses = [[loss for _, loss in seeds] for seeds in zip(*curves, strict=True)]
        colour = COLOURS[index % len(COLOURS)]
        axis.plot(
            tokens,
            [mean(seeds) for seeds in losses],
            color=colour,
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            label=name,
        )
        lowest, highest = ([end(seeds) for seeds in losses] for end in (min, max))
        axis.fill_between(tokens, lowest, highest, color=colour, alpha=0.2)
    axis.set_ylim(frame["lowest"].min() - 0.05, frame["highest"].max() + 0.6)
    axis.set_xlabel("tokens of all workers")
    axis.set_ylabel("validation loss, nats per character")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_title(
        "Best CO2 as published at tau 3 and 12, and others: mean and range of the seeds", fontsize=9
    )
    axis.legend(frameon=False, fontsize=8)


def _last(axis: Axes, frame: pd.DataFrame) -> None:
    heights = range(len(frame))[::-1]
    axis.hlines(
        heights, frame["lowest"], frame["highest"], color=COLOURS[0], linewidth=3, alpha=0.4
    )
    axis.plot(frame["loss"], heights, "o", color=COLOURS[0], markersize=5)
    axis.set_yticks(heights, frame["configuration"])
    base = frame.loc[frame["configuration"] == "AdamW-DDP", "loss"]
    if len(base):
        axis.axvline(float(base.iloc[0]), color="grey", linestyle=":", linewidth=1)
    axis.set_xlabel("validation loss after the last step: mean and range of the seeds")


CATALOG: Path = FOLDER.parent / "co2sim/catalog/step_factors.toml"
_MIN_SEEDS = 3
"""For a mean that counts; other runs were made to choose by."""

_HEAD = """\
# Steps of a method that are worth one step of DDP; written by `python benchmarks/convergence.py`.
# factor = steps / ddp_steps: the method ends with the validation loss that DDP has after ddp_steps,
# in a run of the same length, schedule and batch. Each has its own best learning rate; of several
# outer steps the best counts. beta1 is that of AdamW in the local steps. A shorter run of DDP
# would have reached that loss sooner: the true factor is larger. Longer trainings, other models and
# other batches have other factors.
"""


def step_factors(runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """How many steps of a method are worth one of DDP: the best outer step of budget and strategy.

    The loss that a method ends with is looked up on the mean curve of DDP: the same run length,
    warm-up and decay, each at its own best learning rate. A run of DDP that was as short as that,
    with its learning rate decayed by then, would have reached the loss sooner: the factors are
    lower bounds. Peers have no strategy.
    """
    beta1 = {line.name: line.momentum for line in configurations()}
    whole = runs[["validation_loss", "strategy"]].notna().all(axis=1)
    runs = runs[whole & (runs["seed"] != TUNING_SEED)]
    for label, group in runs.groupby("budget"):
        steps, batch = map(int, str(label).rpartition("-")[2].split("x"))
        curves = [json.loads(text) for text in group.loc[group["strategy"] == "ddp", "curve"]]
        points = np.array(curves)  # seed, validation, (characters, loss)
        losses = points[:, :, 1].mean(axis=0)
        lengths = points[0, :, 0] / points[0, -1, 0] * steps
        best: dict[str, tuple[float, str, int, str]] = {}
        others = group[group["strategy"] != "ddp"].fillna({"outer": ""})
        for (strategy, outer), same in others.groupby(["strategy", "outer"]):
            name = str(same["configuration"].iloc[0])
            line = mean(same["validation_loss"]), str(outer), len(same), name
            if line[2] >= _MIN_SEEDS and line < best.get(strategy, (np.inf, "", 0, "")):
                best[strategy] = line
        facts = json.loads(group["facts"].iloc[0])
        for strategy in sorted(best, key=lambda text: (parse(text).name, _tau(text))):
            loss, outer, seeds, name = best[strategy]
            worth = float(np.interp(-loss, -losses, lengths))
            yield {
                "strategy": title(parse(strategy)),
                "factor": round(steps / worth, 2),
                "loss": round(loss, 4),
                "ddp_steps": round(worth),
                "steps": steps,
                "batch": batch,
                "workers": Budget().workers,
                "seeds": seeds,
                "outer": outer,
                "beta1": beta1[name],
                "parameters": facts["parameters"],
                "source": f"benchmarks/results/{RUNS}, {label}",
            }


def _tau(text: str) -> int:
    strategy = parse(text)
    return round_steps(strategy) if isinstance(strategy, LocalSteps) else 1


def catalog(runs: pd.DataFrame) -> str:
    """The factors as a file of the catalog."""
    parts = [
        "\n".join(["[[factor]]", *(f"{key} = {json.dumps(x)}" for key, x in factor.items())])
        for factor in step_factors(runs)
    ]
    return "\n\n".join([_HEAD.rstrip(), *parts]) + "\n"


def budget_of(options: Namespace) -> Budget:
    """Of all runs."""
    return Budget.small() if options.quick else Budget()


def studies(options: Namespace) -> list[Study]:
    """The study."""
    budget = budget_of(options)
    return [trainings(options.out / RUNS, partial(wanted, budget), budget.workers)]


def write(options: Namespace) -> None:
    """Write convergence.csv, .md and .png of what is complete."""
    budget, rows = budget_of(options), finished(options.out / RUNS)
    frame = summary(budget, rows)
    if not frame.empty:
        frame.drop(columns="curve").to_csv(options.out / "convergence.csv", index=False)
        picture = png((12.0, 5.2), lambda figure: draw(figure, frame))
        publish(options, "convergence", report(frame, budget, rows), picture)
    if not budget.quick:
        path = CATALOG if options.out == RESULTS else options.out / CATALOG.name
        path.write_text(catalog(pd.read_csv(options.out / RUNS)))


def main() -> int:
    """Run, and write what is complete."""
    return command(__doc__, "three configurations of a tiny model, in seconds", studies, write)


if __name__ == "__main__":
    sys.exit(main())
