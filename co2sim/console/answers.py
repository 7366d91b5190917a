"""What it takes to train so many tokens, in a sentence: the answer before the tables."""

import math
from collections.abc import Sequence

from rich.console import Console

from co2sim.console.tables import print_lines
from co2sim.result import Result
from co2sim.totals import Totals
from co2sim.units import counted

Trainings = Sequence[tuple[str, Result, Totals | None]]
"""What is trained how, in words; the figures, and what it takes."""

_LONG = 1000


def in_words(found: Totals, unit: str) -> str:
    """Days, money (or GPU-hours), energy and carbon, as far as they are known, with intervals.

    `unit` is what the model calls its tokens.
    """
    text = in_short(found, unit)
    for value, low, high, unit_ in (
        (found.energy_kwh, found.energy_kwh_low, found.energy_kwh_high, "MWh"),
        (found.co2e_kg, found.co2e_kg_low, found.co2e_kg_high, "t CO2e"),
    ):
        if value is not None:
            text += f", {amount(value / 1000)} {unit_}{_between(low, high, 1000)}"
    return text


def in_short(found: Totals, unit: str) -> str:
    """Days and money (or GPU-hours), as `in_words` has them."""
    text = f"{_short(found.tokens)} {unit}s in {amount(found.days)} days"
    text += _between(found.days_low, found.days_high)
    if found.factor.measured is not None:
        text += f" or more, as {found.factor.factor:.3g} steps or more are worth one of ddp"
    if found.cost is None:
        text += f", {found.gpu_hours:,.0f} GPU-hours"
    else:
        ends = _between(found.cost_low, found.cost_high)
        text += f", for {found.cost:,.0f} {found.currency}{ends}"
    return text


def print_answer(out: Console, trainings: Trainings) -> None:
    """The training of a single case; of several that fit in memory, the cheapest and fastest."""
    print_lines(out, *sentences(trainings), "")


def sentences(trainings: Trainings) -> list[str]:
    """The answer, a sentence each."""
    best = chosen(trainings)
    if not best:
        return ["nobody knows what its steps are worth: --steps-factor sets that"]
    alone = sum(found is not None for _, _, found in trainings) == 1
    said = []
    if not next(iter(best.values()))[1].fits_in_memory:
        said.append(f"{'it does' if alone else 'none of these does'} not fit in memory; if it did:")
    for head, (name, result, found) in best.items():
        assert found is not None
        said.append(f"{'' if alone else f'{head}: '}{name}: {in_words(found, result.unit)}.")
    return said


def chosen(trainings: Trainings) -> dict[str, tuple[str, Result, Totals | None]]:
    """The cheapest and the fastest of those that fit in memory, or of all; the same may be both."""
    known = [one for one in trainings if one[2] is not None]
    if not known:
        return {}
    fitting = [one for one in known if one[1].fits_in_memory] or known
    fastest = min(fitting, key=lambda one: one[2].days if one[2] else math.inf)
    priced = [(one[2].cost, one) for one in fitting if one[2] and one[2].cost is not None]
    currencies = {one[2].currency for one in fitting if one[2]}
    if len(priced) < len(fitting) or len(currencies) > 1:
        return {"Fastest": fastest}
    cheapest = min(priced, key=lambda pair: pair[0])[1]
    if cheapest is fastest:
        return {"Cheapest and fastest": fastest}
    return {"Cheapest": cheapest, "Fastest": fastest}


def where(result: Result) -> str:
    """A single case: its strategy and its GPUs."""
    return f"{result.strategy} on {counted(result.gpus, 'GPU')}"


def amount(value: float) -> str:
    """Days or money: three digits, and all before the point."""
    return f"{value:,.0f}" if value >= _LONG else f"{value:.3g}"


def _short(tokens: float) -> str:
    """A large number as people type it: 1e12, 2.5e11."""
    return f"{tokens:g}".replace("e+", "e")


def _between(low: float | None, high: float | None, unit: float = 1) -> str:
    if low is None or high is None:
        return ""
    return f" (90 %: {amount(low / unit)} to {amount(high / unit)})"
