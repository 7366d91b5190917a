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
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import pandas as pd
from convergence import RUNS as BASE_RUNS
from convergence import (
    SEEDS,
    TUNING_SEED,
    Ask,
    Configuration,
    StudyBudget,
    complete,
    configurations,
    run_ranks,
    wanted,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from reports import RESULTS, Known, folder, machine, made_by, parser, read, table

from analysis.convergence import bound
from analysis.convergence.bound import Bound
from analysis.convergence.setting import Late, Setting
from co2sim.common.plots import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2, PublishedCO2
from realrun.launch.launcher import run_local
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

    base: StudyBudget
    parts: tuple[Part, ...]

    @classmethod
    def usual(cls) -> "LongStudy":
        """Lengths of 768 (which the convergence study has run) to 12,288 steps."""
        return cls(
            StudyBudget(),
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
        return cls(
            StudyBudget.small(), (Part(24, lines, (0,)), Part(48, lines[1:], (0,), tunes=True))
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps of runs, the fewest first."""
        return tuple(sorted({part.steps for part in self.parts}))

    def budget(self, steps: int) -> StudyBudget:
        """The same model, batch and warm-up in a run of these steps."""
        if steps == self.base.steps:
            return self.base
        return replace(self.base, steps=steps, eval_every=steps // _VALIDATIONS)

    def asks(self, known: Known) -> Iterator[Ask]:
        """All runs, as far as the finished ones tell; those of the base have to be there."""
        for part in self.parts:
            for name in part.lines:
                yield from self._of_line(part, self._best(name, known), known)

    def counted(self, steps: int, name: str, known: Known) -> list[Ask]:
        """The finished runs of a line of one length that count: at the rate that came last."""
        found = {
            ask.key: ask
            for ask in self.asks(known)
            if (ask.budget.steps, ask.configuration.name) == (steps, name)
            and ask.seed != TUNING_SEED
            and ask.key in known
        }
        last = [ask.lr for ask in found.values()][-1:]
        return [ask for ask in found.values() if [ask.lr] == last]

    def _best(self, name: str, known: Known) -> Ask:
        """The best of the convergence study."""
        configuration = next(c for c in _all_lines() if c.name == name)
        if self.base.quick:
            return Ask(self.base, configuration, configuration.choices[0], RATES[0], SEEDS[0])
        return list(wanted(configuration, self.base, known))[-1]

    def _of_line(self, part: Part, best: Ask, known: Known) -> Iterator[Ask]:
        ask = replace(best, budget=self.budget(part.steps), lr=min(RATES))
        if part.steps == self.base.steps:
            ask = replace(ask, lr=best.lr)
        elif part.tunes:
            trials = [replace(ask, lr=rate, seed=TUNING_SEED) for rate in RATES]
            yield from trials
            unknown = {"validation_loss": "inf"}
            ask = min(trials, key=lambda one: float(known.get(one.key, unknown)["validation_loss"]))
        for seed in part.seeds:
            yield replace(ask, seed=seed)


def _all_lines() -> list[Configuration]:
    return configurations(StudyBudget())


DDP, LOCAL = COMPARED[:2]


def write(study: LongStudy, known: Known, constants: Mapping[str, Any], out: Path) -> None:
    """Write long_study.csv, .md and .png of what is there."""
    frame = summary(study, known, constants)
    if frame.empty:
        return
    frame.to_csv(out / "long_study.csv", index=False)
    text = report(frame, study, constants)
    (out / "long_study.md").write_text(text)
    (out / "long_study.png").write_bytes(draw(frame))
    print(text)


def summary(study: LongStudy, known: Known, constants: Mapping[str, Any]) -> pd.DataFrame:
    """A line for each length and method of which there are runs.

    `above_ddp` is the mean over the seeds that both have, as are its ends; so is `above_local`.
    """
    lines: list[dict[str, Any]] = []
    for steps in study.lengths:
        asks = {name: study.counted(steps, name, known) for name in LINES}
        found = {name: _losses(line, known) for name, line in asks.items()}
        for name, losses in found.items():
            if not losses:
                continue
            ask = asks[name][-1]
            gaps = _gaps(losses, found[DDP])
            lines.append(
                {
                    "steps": steps,
                    "configuration": name,
                    "loss": mean(losses.values()),
                    "seeds": len(losses),
                    "lr": ask.lr,
                    "kept": ask.choice,
                    "above_ddp": mean(gaps) if gaps else math.nan,
                    "least": min(gaps, default=math.nan),
                    "most": max(gaps, default=math.nan),
                    "above_local": mean(_gaps(losses, found[LOCAL]) or [math.nan]),
                    "bound": bounded(ask, constants),
                }
            )
    return pd.DataFrame(lines)


def _losses(asks: list[Ask], known: Known) -> dict[int, float]:
    """Last validation losses by seed."""
    return {ask.seed: float(known[ask.key]["validation_loss"]) for ask in asks}


def _gaps(losses: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    return [loss - base[seed] for seed, loss in losses.items() if seed in base]


def bounded(ask: Ask, constants: Mapping[str, Any]) -> float:
    """The bound of the mean of E|grad f|^2 for a method, at the step that is best for it.

    Fragments and the gap penalty are left out, since the bound knows neither of them: all of the
    model is late, and the penalty is 1. NaN where nothing is proven: for predict = 1.
    """
    strategy, tau = parse(ask.configuration.strategy), ask.configuration.tau
    options = {name: float(value) for name, value in pairs(ask.choice).items()}
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
        rounds=ask.budget.steps // tau,
        local_steps=tau,
        inner_step=1.0,
        outer_step=options.get("lr", 1.0),
        momentum=options.get("momentum", 0.0),
        delay=int(isinstance(strategy, PublishedCO2)),
        late=late,
    )
    found = bound.evaluate(bound.tuned(setting))
    assert isinstance(found, Bound)
    return found.total


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
    found = frame[(frame["configuration"] != DDP) & frame["above_ddp"].notna()].copy()
    found["bound_above_ddp"] = found["bound"] - found["steps"].map(base)
    return found


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


def draw(frame: pd.DataFrame) -> bytes:
    """What was measured beside the bound, both above DDP's."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(10.0, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        lines = excess(frame)
        _lines(left, lines, "above_ddp")
        left.set_title("measured: validation loss above DDP's, nats per character", fontsize=9)
        _lines(right, lines, "bound_above_ddp")
        right.set_title("bound of the mean of E|∇f|² with plain SGD, above DDP's", fontsize=9)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        return render(figure, "png")


def _lines(axis: Axes, lines: pd.DataFrame, column: str) -> None:
    for place, (name, line) in enumerate(lines.groupby("configuration", sort=False)):
        colour = COLOURS[place]
        axis.plot(line["steps"], line[column], color=colour, marker=MARKERS[place], label=str(name))
        if column == "above_ddp":
            axis.vlines(line["steps"], line["least"], line["most"], color=colour, linewidth=3)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("steps of the training")
    steps = sorted(set(lines["steps"]))
    axis.set_xticks(steps, [f"{one:,}" for one in steps])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")


ESTIMATE = "long_study-estimate.json"


def main() -> None:
    """Start the ranks, or be one of them; then write what is complete."""
    command = parser(__doc__, "two lines of a tiny model, in seconds")
    command.add_argument("--report", action="store_true", help="run nothing, only write the table")
    given = command.parse_args()
    study = LongStudy.small() if given.quick else LongStudy.usual()
    base = {} if given.quick else read(RESULTS / BASE_RUNS)

    def plan(known: Known) -> list[Ask]:
        return [ask for ask in study.asks({**base, **known}) if ask.key not in base]

    with folder(given) as out:
        path = out / RUNS
        if "RANK" in os.environ:
            run_ranks(plan, path)
            return
        code = 0 if given.report else complete(plan, path, study.base.workers)
        if not (out / ESTIMATE).exists():
            if given.report:
                command.error(f"--report: {out} has no {ESTIMATE}; run it without --report")
            estimate(study, out / ESTIMATE)

        constants: dict[str, Any] = json.loads((out / ESTIMATE).read_text())
        write(study, {**base, **read(path)}, constants, out)
    sys.exit(code)


def estimate(study: LongStudy, path: Path) -> None:
    """Measure the constants of the bound in a run of local SGD of the base's length."""
    base = study.base
    with tempfile.TemporaryDirectory() as name:
        command = (
            *("realrun", "train", "--strategy", "local_sgd:tau=12", "--lr", "0.01"),
            *("--size", base.size, "--steps", str(base.steps), "--batch", str(base.batch)),
            *("--warmup", str(base.warmup), "--estimate", "--out", name),
        )
        code = run_local(command, base.workers)
        if code:
            sys.exit(code)
        shutil.copy(Path(name) / "estimate.json", path)


if __name__ == "__main__":
    main()
