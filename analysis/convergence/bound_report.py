"""What `co2analysis bound` prints."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from analysis.convergence import bound
from analysis.convergence.bound import TERMS, Bound, Infeasible
from analysis.convergence.setting import Setting
from co2sim.console.tables import print_table


@dataclass(frozen=True, slots=True)
class BoundAnswer:
    """The bound of a setting, whose inner step was perhaps tuned, and SlowMo's published one."""

    setting: Setting
    tuned: bool
    bound: Bound | Infeasible
    published: float | Infeasible


def answer(setting: Setting, *, tune: bool) -> BoundAnswer:
    """Evaluate the bounds of a setting, with the best inner step if `tune` asks for it."""
    setting = bound.tuned(setting) if tune else setting
    published = bound.published(replace(setting, delay=0))
    return BoundAnswer(setting, tune, bound.evaluate(setting), published)


def bound_to_dict(answered: BoundAnswer) -> dict[str, Any]:
    """The answer as plain values."""
    terms = answered.bound
    return {
        "inner_step": answered.setting.inner_step,
        "tuned": answered.tuned,
        "largest_inner_step": bound.largest_inner_step(answered.setting),
        "load": bound.load(answered.setting),
        "feasible": isinstance(terms, Bound),
        "bound": {**asdict(terms), "total": terms.total} if isinstance(terms, Bound) else None,
        "slowmo_published": answered.published if isinstance(answered.published, float) else None,
    }


def print_bound(out: Console, answered: BoundAnswer) -> None:
    """The answer as a table."""
    setting, terms, published = answered.setting, answered.bound, answered.published
    note = " (tuned)" if answered.tuned else ""
    if note and not bound.has_best_step(setting):
        note = " (the bound falls up to the largest feasible gamma: without noise, its infimum)"
    rows = [
        ("inner step gamma", f"{setting.inner_step:.6g}{note}"),
        ("largest feasible gamma", f"{bound.largest_inner_step(setting):.6g}"),
        ("load L eta + 2 L sqrt(C), feasible below 1", f"{bound.load(setting):.4f}"),
    ]
    if isinstance(terms, Bound):
        rows += [(f"{name} term", f"{getattr(terms, name):.6g}") for name in TERMS]
        rows.append(("bound of the mean of E|grad f|^2", f"{terms.total:.6g}"))
    else:
        rows.append(("bound of the mean of E|grad f|^2", "infeasible: the theorem is silent"))
    silent = "silent: the horizon is too short"
    rows.append(
        (
            "SlowMo's published bound, at its own step",
            f"{published:.6g}" if isinstance(published, float) else silent,
        )
    )
    print_table(out, "bound", ("figure", "value"), rows)
