"""What a training's folder says of the bound: its setting, and the residual of its momentum.

Training records how far its outer momentum was from the exact one, because it was clipped or
because averages were rounded to int8 or int4 (`realrun.algorithms.Stats`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from analysis.convergence.bound import Bound
from analysis.convergence.clipping import with_residual
from analysis.convergence.setting import Late, Setting
from co2sim.common.delayed_averaging import bounded
from co2sim.common.errors import CatalogError, OptionError
from co2sim.common.files import MAX_RECORD_BYTES, text_of
from co2sim.common.tables import print_table
from co2sim.strategies.co2 import CO2
from realrun.train.constants import BOUNDED, unlike_sgd
from realrun.train.folder import ESTIMATE, RECORD
from realrun.train.log import LogRow, read
from realrun.train.settings import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What the bound is given by one training.

    `clipping` and `rounding` are roots of means over rounds of squares, in units of one gradient:
    of Lambda |u - clip(u)| / (gamma tau), and of an upper bound of |D - D'| / (gamma tau) for the
    average D' that was used in the place of D. `running` is that of clipping for the running mean
    with `decay`, None where none was kept. `method` and `constants` are arguments of `Setting`;
    `constants` has those that the training has measured (`--estimate`), and may be empty. `notes`
    say what of the run the theorem does not cover, in sentences.
    """

    method: Mapping[str, Any]
    constants: Mapping[str, float]
    clipping: float
    rounding: float
    notes: tuple[str, ...]
    running: float | None = None
    decay: float = 0.0

    def given(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `Setting`: `options` that are not None come before what was measured.

        Raises OptionError for what the run says itself.
        """
        chosen = {name: value for name, value in options.items() if value is not None}
        twice = [name for name in chosen if name in self.method]
        if twice:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in twice)
            raise OptionError(f"{flags}: with --run the training says it; leave it out")
        return {**self.method, **self.constants, **chosen}

    @property
    def residual(self) -> float:
        """An upper bound of eps (Minkowski), in units of one gradient: of one run, not a mean."""
        return self.clipping + self.rounding

    def without_residual(self, setting: Setting) -> "RunRecord":
        """The same, with a note that what was clipped or rounded does not count."""
        late = setting.late
        assert late is not None
        note = (
            "The bound does not count what clip and quantization took off: that needs keep 1 and"
            f" predict 0; keep is {late.keep:g}, predict {late.predict:g}."
        )
        return replace(self, notes=(*self.notes, note))

    def best_residual(self, setting: Setting) -> tuple[float, float]:
        """Eps and its decay, 0 for the residual itself: of both the one with the smaller bound.

        The running mean of what is rounded is at most as large as what is rounded (Young).
        """
        kept = [] if self.running is None else [(self.running + self.rounding, self.decay)]

        def total(pair: tuple[float, float]) -> float:
            terms = with_residual(setting, pair[0], decay=pair[1])
            return terms.total if isinstance(terms, Bound) else math.inf

        return min([(self.residual, 0.0), *kept], key=total)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "clip_residual": self.residual,
            "clipping": self.clipping,
            "running": self.running,
            "decay": self.decay,
            "rounding": self.rounding,
            "notes": list(self.notes),
        }


def read_run(folder: Path) -> RunRecord:
    """Read what `realrun train --out FOLDER` has left there; a training that was stopped, too.

    The last row of the log counts, which is before the averages that are used at the very end: the
    theorem leaves these out. Raises CatalogError for what is no training's folder, and OptionError
    for a training that the bound is not about.
    """
    record, rows = _json(folder / RECORD), read(folder)
    try:
        settings, facts = TrainSettings(**record["settings"]), record["facts"]
        name = settings.parsed.name
        rule = facts["outer_step"] if name in BOUNDED else {}
        workers = int(facts["workers"]) if name in BOUNDED else 1
    except (KeyError, TypeError, ValueError) as error:
        raise CatalogError(
            f"{folder / RECORD} does not say what the outer step was: it is of an older training"
        ) from error
    if name not in BOUNDED:
        raise OptionError(f"{folder} is of {name}; the bound is about {', '.join(BOUNDED)}")
    if not rows or rows[-1].rounds is None or rows[-1].clip_residual is None:
        raise CatalogError(f"the log of {folder} holds no round with its clip_residual")
    last = rows[-1]
    settings = settings.chosen(last.tau)
    rounds = last.step // settings.round
    if not rounds:
        raise OptionError(
            f"{folder} has {last.step} steps, and its rounds {settings.round}: the bound needs a"
            " whole round"
        )
    decay = rule.get("residual_decay", 0.0)
    step = sum(map(settings.learning_rate, range(1, last.step + 1))) / last.step
    unit = step * settings.round * math.sqrt(rounds)
    method = {
        "workers": workers,
        "rounds": rounds,
        "local_steps": settings.round,
        "inner_step": step,
        **_outer(settings, rule, last),
    }
    return RunRecord(
        method=method,
        constants=_constants(folder / ESTIMATE),
        clipping=math.sqrt(last.clip_residual or 0.0) / unit,
        rounding=math.sqrt(last.rounding_residual or 0.0) / unit,
        notes=tuple(_notes(settings, rule)),
        running=math.sqrt(last.running_residual or 0.0) / unit if decay else None,
        decay=decay,
    )


def print_run(out: Console, run: RunRecord) -> None:
    """What a training's momentum lost, and what of it the theorem does not cover."""
    rows = [
        ("by clipping", run.clipping),
        ("by int8 or int4 averages, at most", run.rounding),
        ("eps, for --clip-residual", run.residual),
    ]
    if run.running is not None:
        rows.insert(1, (f"... its running mean, decay {run.decay:g}", run.running))
        name = f"eps, for --clip-residual with --residual-decay {run.decay:g}"
        rows.append((name, run.running + run.rounding))
    title = "what the training's momentum lost, in units of one gradient"
    shown = [(name, f"{value:.6g}") for name, value in rows]
    print_table(out, title, ("figure", "value"), shown)
    for note in run.notes:
        out.print(f"- {note}", highlight=False, markup=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(text_of(path, MAX_RECORD_BYTES))
    except OSError as error:
        raise CatalogError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CatalogError(f"{path} is not the record of a training: {error}") from error
    if not isinstance(values, dict):
        raise CatalogError(f"{path} is not the record of a training")
    return values


def _outer(settings: TrainSettings, rule: Mapping[str, Any], last: LogRow) -> dict[str, Any]:
    """The outer step and its delay, as arguments of Setting; plain averaging has no numbers."""
    momentum, strategy, tau = rule.get("outer_momentum", 0.0), settings.parsed, settings.round
    values = {
        "outer_step": rule.get("outer_lr", 1.0),
        "momentum": momentum,
        "penalty": rule.get("penalty", 1.0),
        "delay": rule["staleness"],
    }
    if rule.get("gap") == "gap_aware":
        values["most_penalty"] = 1 + rule["staleness"] / (1 - momentum)
    if last.delay is not None and isinstance(strategy, CO2):
        keep, predict = strategy.kept()
        predict = bounded(tau, last.delay, keep, predict)
        parts = rule.get("fragments", 1)
        values["late"] = Late(steps=last.delay, keep=keep, predict=predict, fragments=parts)
    return values


def _constants(path: Path) -> dict[str, float]:
    """L, sigma squared and Delta, where they were measured."""
    if not path.exists():
        return {}
    values = _json(path)
    try:
        return {
            "smoothness": float(values["smoothness"]),
            "noise": float(values["noise"]["value"]),
            "gap": float(values["gap"]["value"]),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CatalogError(f"{path} is not the estimate of a training: {error}") from error


def _notes(settings: TrainSettings, rule: Mapping[str, Any]) -> list[str]:
    """What of a run the theorem does not cover."""
    notes = []
    if steps := unlike_sgd(settings):
        notes.append(f"The bound is about plain SGD, not about {', '.join(steps)}.")
    if settings.warmup or settings.final_lr != 1:
        notes.append("The bound wants one gamma; this is the mean learning rate of the run.")
    if getattr(settings.parsed, "dtype", None) == "bf16":
        notes.append("What bf16 rounds off averages is not recorded.")
    if rule.get("preview"):
        notes.append("The bound is not about a preview.")
    if rule.get("gap") == "gap_aware" and rule.get("clip") is not None:
        notes.append(
            "The residual was recorded with the penalty of each round, which the theorem counts as"
            " 1: eps may be too large, at most by the largest penalty as a factor."
        )
    return notes
