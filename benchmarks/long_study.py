"""How the gap to DDP changes with the length of the training, beside what the bound says.

    python benchmarks/long_study.py            # 90 minutes on two cores; go on with the same
    python benchmarks/long_study.py --quick    # two lines of a tiny model, in seconds

A few lines of the convergence study, whose runs of 768 steps are taken from there, at 3,072, 6,144
and 12,288 steps. Each finished run is a row of long_study-runs.csv; what is there is not run again.
The constants of the bound are estimated once, in long_study-estimate.json.

Writes long_study.csv, long_study.md and long_study.png.
"""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import pandas as pd
from convergence import RUNS as BASE_RUNS
from convergence import configurations
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from reports import RESULTS, legend_below, machine, made_by, needed, png, publish, table
from studies import (
    SEEDS,
    TUNING_SEED,
    Budget,
    Rows,
    Study,
    Training,
    command,
    estimated,
    finished,
    trainings,
    tuned,
)

from analysis.convergence import bound
from analysis.convergence.bound import Bound
from analysis.convergence.setting import Late, Setting
from co2sim.common.plots import COLOURS
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2, PublishedCO2
from realrun.train.algorithm_registry import pairs
from realrun.train.log import MARKERS

RUNS = "long_study-runs.csv"
"""The file of finished runs."""

RATES = (5e-3, 1e-2)
"""Between these the learning rate is chosen; the best at 768 steps is one of them for each line."""

COMPARED = ("AdamW-DDP", "LocalSGD 12", "CO2 12, gap", "CO2 delay 1, tau 12, 12 fragments")
LINES = (*COMPARED, "CO2 delay 4, tau 12, 12 fragments")
"""Names of the lines of the convergence study; the last not at all lengths."""

_VALIDATIONS = 8
"""In a run, whatever its length."""


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of one length: which lines, with which seeds, and whether their rate is chosen here."""

    steps: int
    lines: tuple[str, ...]
    seeds: tuple[int, ...]
    tunes: bool = False


@dataclass(frozen=True, slots=True)
class LongStudy:
    """What is run, in this order. `base` is the budget of the convergence study."""

    base: Budget
    parts: tuple[Part, ...]

    @classmethod
    def usual(cls) -> "LongStudy":
        """Lengths of 768 (which the convergence study has run) to 12,288 steps."""
        return cls(
            Budget(),
            (
                Part(768, LINES, SEEDS),
                Part(6144, ("LocalSGD 12", LINES[-1]), (0,)),
                Part(3072, LINES, (0,)),
                Part(6144, ("AdamW-DDP", "CO2 12, gap", COMPARED[-1]), (0,)),
                Part(12288, COMPARED, (0,)),
                Part(3072, COMPARED, (0, 1), tunes=True),
            ),
        )

    @classmethod
    def small(cls) -> "LongStudy":
        """A trial of seconds, too short to mean anything."""
        lines = ("AdamW-DDP", "LocalSGD 12")
        return cls(Budget.small(), (Part(24, lines, (0,)), Part(48, lines[1:], (0,), tunes=True)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps of runs, the fewest first."""
        return tuple(sorted({part.steps for part in self.parts}))

    def budget(self, steps: int) -> Budget:
        """The same model, batch and warm-up in a run of these steps."""
        if steps == self.base.steps:
            return self.base
        return replace(self.base, steps=steps, eval_every=steps // _VALIDATIONS)

    def wanted(self, rows: Rows) -> Iterator[Training]:
        """All runs, as far as the finished ones tell; those of the base have to be there."""
        for part in self.parts:
            for name in part.lines:
                yield from self._of_line(part, self._best(name, rows), rows)

    def counted(self, steps: int, name: str, rows: Rows) -> list[Training]:
        """The finished runs of a line of one length that count: at the rate that came last."""
        runs = {
            run.key: run
            for run in self.wanted(rows)
            if (run.steps, run.configuration.name) == (steps, name)
            and run.seed != TUNING_SEED
            and run.loss(rows) < math.inf
        }
        last = [run.lr for run in runs.values()][-1:]
        return [run for run in runs.values() if [run.lr] == last]

    def _best(self, name: str, rows: Rows) -> Training:
        """The best of the convergence study."""
        configuration = next(line for line in configurations() if line.name == name)
        if self.base.quick:
            return Training(self.base, configuration, configuration.choices[0], RATES[0], SEEDS[0])
        return list(tuned(configuration, self.base, rows))[-1]

    def _of_line(self, part: Part, best: Training, rows: Rows) -> Iterator[Training]:
        run = replace(best, budget=self.budget(part.steps), lr=min(RATES))
        if part.steps == self.base.steps:
            run = replace(run, lr=best.lr)
        elif part.tunes:
            trials = [replace(run, lr=rate, seed=TUNING_SEED) for rate in RATES]
            yield from trials
            run = min(trials, key=lambda trial: trial.loss(rows))
        for seed in part.seeds:
            yield replace(run, seed=seed)


DDP, LOCAL = COMPARED[:2]


def summary(study: LongStudy, rows: Rows, constants: Mapping[str, Any]) -> pd.DataFrame:
    """A line for each length and method of which there are runs.

    `above_ddp` is the mean over the seeds that both have, as are its ends; so is `above_local`.
    """
    lines: list[dict[str, Any]] = []
    for steps in study.lengths:
        runs = {name: study.counted(steps, name, rows) for name in LINES}
        losses = {name: {run.seed: run.loss(rows) for run in runs[name]} for name in LINES}
        for name in filter(losses.get, LINES):
            run, gaps = runs[name][-1], _gaps(losses[name], losses[DDP])
            lines.append(
                {
                    "steps": steps,
                    "configuration": name,
                    "loss": mean(losses[name].values()),
                    "seeds": len(losses[name]),
                    "lr": run.lr,
                    "kept": run.choice,
                    "above_ddp": mean(gaps) if gaps else math.nan,
                    "least": min(gaps, default=math.nan),
                    "most": max(gaps, default=math.nan),
                    "above_local": mean(_gaps(losses[name], losses[LOCAL]) or [math.nan]),
                    "bound": bounded(run, constants),
                }
            )
    return pd.DataFrame(lines)


def _gaps(losses: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    return [loss - base[seed] for seed, loss in losses.items() if seed in base]


def bounded(run: Training, constants: Mapping[str, Any]) -> float:
    """The bound of the mean of E|grad f|^2 for a method, at the step that is best for it.

    Fragments and the gap penalty are left out, since the bound knows neither of them: all of the
    model is late, and the penalty is 1. NaN where nothing is proven: for predict = 1.
    """
    strategy, tau = parse(run.configuration.strategy), run.configuration.tau
    options = {name: float(value) for name, value in pairs("outer", run.choice).items()}
    late = None
    if isinstance(strategy, CO2) and isinstance(strategy.delay, int):
        kept = {name: options.pop(name) for name in ("keep", "predict") if name in options}
        if kept.get("predict") == 1:
            return math.nan
        late = Late(steps=strategy.delay, **kept)
    setting = Setting(
        smoothness=constants["smoothness"],
        noise=constants["noise"]["value"],
        gap=constants["gap"]["value"],
        workers=constants["workers"],
        rounds=run.steps // tau,
        local_steps=tau,
        inner_step=1.0,
        outer_step=options.get("lr", 1.0),
        momentum=options.get("momentum", 0.0),
        delay=int(isinstance(strategy, PublishedCO2)),
        late=late,
    )
    best = bound.evaluate(bound.tuned(setting))
    assert isinstance(best, Bound)
    return best.total


def report(frame: pd.DataFrame, study: LongStudy, constants: Mapping[str, Any]) -> str:
    """The tables in Markdown."""
    base = study.base
    rows = [
        {
            "steps": f"{line['steps']:,}",
            "configuration": str(line["configuration"]),
            "loss": f"{line['loss']:.4f}",
            "above DDP": _signed(line["above_ddp"]),
            "above LocalSGD": _signed(line["above_local"]),
            "seeds": str(line["seeds"]),
            "lr": f"{line['lr']:g}",
            "outer step": str(line["kept"]) or "-",
            "bound": "-" if math.isnan(line["bound"]) else f"{line['bound']:.3g}",
        }
        for _, line in frame.iterrows()
    ]
    return f"""\
# The gap to DDP in longer trainings

Model, data, batch and warm-up are those of [the convergence study](convergence.md), and so are the\
 runs of {base.steps:,} steps. Runs of other lengths have the same schedule: {base.warmup} steps of\
 warm-up, then half a cosine to a tenth. Outer step and what is kept are the best of there. The\
 learning rate of longer runs is 0.005 for all; at 3,072 steps it is the better of 0.005 and 0.01\
 where both were tried with another seed. {machine()}

*Loss* is the validation loss of the mean of the workers after the last step; *above* are means of\
 differences of the same seeds. *Bound* is that of `co2analysis bound` of the mean of E|∇f|², for\
 plain SGD with the inner step that is best for each line, with L = {constants["smoothness"]:.4g},\
 σ² = {constants["noise"]["value"]:.4g}, Δ = {constants["gap"]["value"]:.4g}, ζ = 0, as\
 `realrun train --estimate` finds them with LocalSGD in {base.steps:,} steps. It knows no\
 fragments, no gap penalty and no Adam, and it is not proven for `predict=1`.

{table(rows)}

How gaps fall: the slope of log gap over log steps between the shortest and the longest run.

{table(_slopes(frame))}

{made_by()} Every run is in long_study-runs.csv, those of {base.steps:,} steps in\
 convergence-runs.csv.
"""


def _signed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.4f}"


def excess(frame: pd.DataFrame) -> pd.DataFrame:
    """The lines that have a gap to DDP, with that of the bound as `bound_above_ddp`."""
    base = frame[frame["configuration"] == DDP].set_index("steps")["bound"]
    others = frame[(frame["configuration"] != DDP) & frame["above_ddp"].notna()]
    return others.assign(bound_above_ddp=others["bound"] - others["steps"].map(base))


def _slopes(frame: pd.DataFrame) -> list[dict[str, str]]:
    rows = []
    for name, line in excess(frame).groupby("configuration", sort=False):
        ends = line.iloc[[0, -1]]
        run = math.log(ends["steps"].iloc[1] / ends["steps"].iloc[0])
        cells = {"configuration": str(name)}
        cells["steps"] = " to ".join(f"{steps:,}" for steps in ends["steps"])
        for title, column in (("measured", "above_ddp"), ("bound", "bound_above_ddp")):
            first, last = ends[column]
            falls = run > 0 and first > 0 and last > 0
            cells[title] = f"{math.log(last / first) / run:+.2f}" if falls else "-"
        rows.append(cells)
    return rows


def draw(figure: Figure, frame: pd.DataFrame) -> None:
    """What was measured beside the bound, both above DDP's."""
    left, right = figure.subplots(1, 2)
    lines = excess(frame)
    _lines(left, lines, "above_ddp")
    left.set_title("measured: validation loss above DDP's, nats per character", fontsize=9)
    _lines(right, lines, "bound_above_ddp")
    right.set_title("bound of the mean of E|∇f|² with plain SGD, above DDP's", fontsize=9)
    legend_below(figure, left, 3)


def _lines(axis: Axes, lines: pd.DataFrame, column: str) -> None:
    for index, (name, line) in enumerate(lines.groupby("configuration", sort=False)):
        colour = COLOURS[index]
        axis.plot(line["steps"], line[column], color=colour, marker=MARKERS[index], label=str(name))
        if column == "above_ddp":
            axis.vlines(line["steps"], line["least"], line["most"], color=colour, linewidth=3)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("steps of the training")
    steps = sorted(set(lines["steps"]))
    axis.set_xticks(steps, [f"{count:,}" for count in steps])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")


ESTIMATE = "long_study-estimate.json"


def estimate(options: Namespace) -> None:
    """Measure the constants of the bound in a run of local SGD of the base's length, once."""
    base, path = study_of(options).base, options.out / ESTIMATE
    if not path.exists():
        words = ("--strategy", "local_sgd:tau=12", "--lr", "0.01", "--size", base.size)
        words += ("--steps", str(base.steps), "--batch", str(base.batch))
        constants = estimated((*words, "--warmup", str(base.warmup)), base.workers)
        path.write_text(json.dumps(constants, indent=2) + "\n")


def study_of(options: Namespace) -> LongStudy:
    """What is run."""
    return LongStudy.small() if options.quick else LongStudy.usual()


def base_rows(options: Namespace) -> Rows:
    """The finished runs of the convergence study."""
    return {} if options.quick else finished(RESULTS / BASE_RUNS)


def studies(options: Namespace) -> list[Study]:
    """The study."""
    study, base = study_of(options), base_rows(options)

    def wanted(rows: Rows) -> list[Training]:
        return [run for run in study.wanted(base | rows) if run.key not in base]

    return [trainings(options.out / RUNS, wanted, study.base.workers)]


def write(options: Namespace) -> None:
    """Write long_study.csv, .md and .png of what is there."""
    study, rows = study_of(options), base_rows(options) | finished(options.out / RUNS)
    constants = json.loads(needed(options.out / ESTIMATE))
    frame = summary(study, rows, constants)
    if not frame.empty:
        frame.to_csv(options.out / "long_study.csv", index=False)
        picture = png((10.0, 4.2), lambda figure: draw(figure, frame))
        publish(options, "long_study", report(frame, study, constants), picture)


def main() -> int:
    """Run, and write what is complete."""
    return command(__doc__, "two lines of a tiny model, in seconds", studies, write, estimate)


if __name__ == "__main__":
    sys.exit(main())
