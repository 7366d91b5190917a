"""What a training takes, on the terminal: rows, a table, and lines on both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console

from co2sim.catalog import Fact
from co2sim.common import convert
from co2sim.common.tables import print_lines, print_table
from co2sim.common.units import Seconds, counted, duration, figures, scaled
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import power
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, remark, scale_of, to_loss
from co2sim.prediction.totals import (
    NEEDED,
    Totals,
    basis,
    examples,
    knee,
    tokens_of,
    totals_of,
)
from co2sim.prediction.whole import whole_words
from co2sim.report.text.bill import billed

Tokens = Annotated[
    float | None,
    typer.Option(
        parser=lambda text: tokens_of(convert.amount("--tokens", text)),
        metavar="N",
        help="Add what it takes to train N tokens, such as 1e12 or 1T: days, GPU-hours, money, kWh"
        " and kg of CO2e. N are those that ddp would train; local updates need more.",
    ),
]
_NAMED = 3
"""Values of one number that are named."""


def rows_of(totals: Totals | None, unit: str) -> list[tuple[str, str]]:
    """The totals as rows of a single result."""
    if totals is None:
        return [("days, cost and energy", "steps factor not known")]
    more = f", {short(totals.trained)} trained" if totals.trained != totals.tokens else ""
    rows = [
        (f"days for {short(totals.tokens)} {unit}s{more}", ranged(totals, "days")),
        ("GPU-hours", figures(totals.gpu_hours)),
    ]
    if totals.cost is not None:
        rows.append((str(totals.currency), ranged(totals, "cost")))
    if totals.power_w is not None:
        rows += [("average power, at the meter", scaled(totals.power_w, "W"))]
        rows += [("kWh", ranged(totals, "energy_kwh"))]
    if totals.co2e_kg is not None:
        rows.append(("kg CO2e", ranged(totals, "co2e_kg")))
    return rows


def print_totals(
    out: Console,
    tokens: float,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    outcomes: Sequence[object],
    trained: Sequence[Totals | None],
    left: int = 1,
    *,
    where: str = "",
) -> None:
    """A table of what the training of tokens takes: `rows`, which name the cases, and totals.

    The last column says what does not fit in memory, if anything does not; the title `where`.
    """
    unit = next(outcome.unit for outcome in outcomes if isinstance(outcome, Result))
    known, cells = table_of(trained)
    misfits = [outcome.misfit if isinstance(outcome, Result) else "" for outcome in outcomes]
    known += ["in memory"] * any(misfits)
    shown = [
        [*row, *more, *([misfit] if any(misfits) else [])]
        for row, misfit, more in zip(rows, misfits, cells, strict=True)
    ]
    title = f"{where}{': ' if where else ''}to train {short(tokens)} {unit}s"
    print_table(out, title, [*columns, *known], shown, left=left)


def table_of(every: Sequence[Totals | None]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of totals; those that no case knows are left out, "-" is not known."""
    currencies = sorted({totals.currency for totals in every if totals and totals.currency})

    def cost(totals: Totals) -> str:
        named = f" {totals.currency}" if len(currencies) > 1 and totals.currency else ""
        return f"{ranged(totals, 'cost')}{named}"

    shown: dict[str, Callable[[Totals], str]] = {
        "days": lambda totals: ranged(totals, "days"),
        "GPU-hours": lambda totals: figures(totals.gpu_hours),
        " or ".join(currencies): cost,
        "kW": lambda totals: "-" if totals.power_w is None else figures(totals.power_w / 1000),
        "kWh": lambda totals: ranged(totals, "energy_kwh"),
        "kg CO2e": lambda totals: ranged(totals, "co2e_kg"),
        # of failures that nobody named a line says it
        "useful time": lambda totals: (
            f"{totals.goodput:.1%}" if totals.failures and not totals.failures.assumed else "-"
        ),
    }
    cells = {
        head: ["-" if totals is None else cell(totals) for totals in every]
        for head, cell in shown.items()
    }
    kept = {head: column for head, column in cells.items() if set(column) - {"-"}}
    return list(kept), [[column[row] for column in kept.values()] for row in range(len(every))]


def basis_lines(cases: Sequence[Question], every: Iterable[Totals | None]) -> list[str]:
    """What totals rest on, and which numbers are missing; nothing where there are none."""
    every = list(every)
    trained = [totals for totals in every if totals is not None]
    if not trained:
        return []
    facts = _facts(cases)
    lines = [f"counted: {counted_words(trained)}"]
    beside = (whole_words(case, totals) for case, totals in zip(cases, every, strict=True))
    lines += [f"whole: {words}" for words in beside if words][:1]
    if any(totals.power_w is not None for totals in trained):
        said = {name: _said(facts, name) for name in power.NEEDED}
        lines.append(
            f"energy: {power.COMPUTING:.0%} of the TDP{said['gpu.tdp']} while a GPU computes, its"
            f" idle power{said['gpu.idle_power']} while it waits for others; the rest of a"
            f" node{said['node_power']}; PUE{said['pue']}"
        )
    if any(totals.co2e_kg is not None for totals in trained):
        lines.append(
            f"carbon: grid_intensity{_said(facts, 'grid_intensity')}; others: co2sim list grids"
        )
    if any(totals.cost is not None for totals in trained):
        lines.append(f"cost: price_per_gpu{_said(facts, 'price_per_gpu')}")
    if len(trained) == len(cases) == 1 and (bill := billed(trained[0], cases[0].load()[0])):
        lines.append(f"billed: {bill}")
    missing = [name for name in NEEDED if any(name in totals.missing for totals in trained)]
    return [*lines, *_lacking(missing, cases[0].load()[0].value)]


def counted_words(trained: Sequence[Totals]) -> str:
    """What is counted of failures, in a line: whose, and the useful time that they leave."""
    counted = [totals.failures for totals in trained if totals.failures]
    if not counted:
        return (
            "no failures, as of a training of a week or less, or with failures=none;"
            " --set failures=published counts them"
        )
    least, most = (end(each.useful for each in counted) for end in (min, max))
    words = counted[0].words
    if len(counted) > 1:
        named = " or ".join(dict.fromkeys(each.name for each in counted))
        words = f"failures {named}: {_share(least)} to {_share(most)} useful time"
    if any(each.assumed for each in counted):
        words += "; --set failures=none counts none"
    return words


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"


def totals_for(
    cases: Sequence[Question], outcomes: Sequence[object], tokens: float | None, goal: Goal
) -> list[Totals | None]:
    """The totals of cases by their outcomes; None where one is no result, or without tokens."""
    if tokens is None:
        return [None] * len(cases)
    return [
        totals_of(case, outcome, tokens, goal) if isinstance(outcome, Result) else None
        for case, outcome in zip(cases, outcomes, strict=True)
    ]


def _lacking(missing: Sequence[str], cluster: Cluster) -> list[str]:
    lines, of_its_size = [], examples(cluster)
    for names, what in (
        ([name for name in missing if name == "price_per_gpu"], "cost"),
        ([name for name in missing if name in power.NEEDED], "energy"),
        ([name for name in missing if name == "grid_intensity"], "carbon"),
    ):
        if names:
            sets = " ".join(f"--set {name}={of_its_size[name]!r}" for name in names)
            are = "is" if len(names) == 1 else "are"
            lines.append(f"no {what}: {' and '.join(names)} {are} not known; give {sets}, say")
    return lines


def _facts(cases: Sequence[Question]) -> Mapping[str, list[Fact]]:
    """The numbers of all cases that totals rest on, each once."""
    facts_at: dict[str, dict[Fact, None]] = {}
    apart = {(str(case.cluster), *case.overrides.items()): case for case in cases}
    for case in apart.values():
        for fact in basis(case):
            facts_at.setdefault(fact.path, {})[fact] = None
    return {path: list(those) for path, those in facts_at.items()}


def values_of(cases: Sequence[Question], path: str) -> str:
    """The values that cases have of a number, such as a price, with where they come from."""
    return _said(_facts(cases), path).strip()


def _said(facts: Mapping[str, Sequence[Fact]], path: str) -> str:
    """The values of a number, each with the first words on where it comes from."""
    said = [f"{fact.value}{_why(fact)}" for fact in facts.get(path, ())]
    more = len(said) - _NAMED
    others = f" or {more} others" if more > 0 else ""
    return f" {' or '.join(said[:_NAMED])}{others}" if said else ""


def _why(fact: Fact) -> str:
    name = fact.source.partition(":")[0]
    if fact.assumed:
        return " (assumed)" if name.startswith("assumed") else f" (assumed: {name})"
    return f" ({name})" if fact.path in {"price_per_gpu", "grid_intensity", "pue"} and name else ""


def ranged(totals: Totals, name: str) -> str:
    """An amount of totals, such as "cost", with its interval, as far as they are known."""
    value, *ends = (getattr(totals, f"{name}{end}") for end in ("", "_low", "_high"))
    if value is None or ends == [None, None]:
        return "-" if value is None else figures(value)
    low, high = ("?" if end is None else figures(end) for end in ends)
    return f"{figures(value)} ({low} to {high})"


Trainings = Sequence[tuple[str, Result, Totals | None]]
"""Sentences on what is trained and how; the figures, and what it takes."""

_LONG = 1000


def in_words(totals: Totals, unit: str) -> str:
    """Days, money (or GPU-hours), energy and carbon, as far as they are known, with intervals.

    `unit` is what the model calls its tokens.
    """
    text = in_short(totals, unit)
    for name, thousands in (("energy_kwh", "MWh"), ("co2e_kg", "t CO2e")):
        if (value := getattr(totals, name)) is not None:
            text += f", {amount(value / 1000)} {thousands}{_between(totals, name, 1000)}"
    return text


def in_short(totals: Totals, unit: str) -> str:
    """Days and money (or GPU-hours), as `in_words` has them."""
    text = f"{short(totals.tokens)} {unit}s in {amount(totals.days)} days"
    text += _between(totals, "days")
    if not totals.factor.certain:
        more = " or more" if totals.factor.high is None else ""
        equal = amount(totals.days / totals.factor.factor)
        text += f"{more} to the loss of ddp ({equal} at equal steps),"
        text += f" as {totals.factor} steps are worth one of ddp"
    if totals.cost is None:
        return f"{text}, {totals.gpu_hours:,.0f} GPU-hours"
    return f"{text}, for {totals.cost:,.0f} {totals.currency}{_between(totals, 'cost')}"


_SHORT = ((1.0, (1.0, "days")), (1 / 24, (1 / 24, "h")), (0.0, (1 / 1440, "min")))
"""From how many days on which unit is used, behind the days that one is."""


def at_a_glance(totals: Totals, *, ranged: bool = True) -> str:
    """Days with their interval, and money, with its own where `ranged`; what a screen begins with.

    Less than a day is in hours or minutes. What a step is worth and GPU-hours are left to other
    lines.
    """
    size, unit = next(shown for least, shown in _SHORT if totals.days >= least)
    text = f"{amount(totals.days / size)} {unit}{_between(totals, 'days', size)}"
    if totals.cost is None:
        return text
    ends = _between(totals, "cost") if ranged else ""
    return f"{text}, {totals.cost:,.0f} {totals.currency}{ends}"


NOT_KNOWN = "what its steps are worth is not known: --steps-factor sets it"
"""What is said where no training has totals."""


def chosen(trainings: Trainings) -> dict[str, tuple[str, Result, Totals | None]]:
    """The best trade, the cheapest and the fastest of those that fit in memory, or of all.

    The same may be two of them, or all: see `knee`. Without prices only the fastest.
    """
    trained = [training for training in trainings if training[2] is not None]
    if not trained:
        return {}
    fitting = [training for training in trained if training[1].fits_in_memory] or trained
    spent_on = [totals for _, _, totals in fitting if totals]
    days, costs = ([t.days for t in spent_on], [t.cost for t in spent_on if t.cost is not None])
    fastest = fitting[days.index(min(days))]
    if len(costs) < len(fitting) or len({totals.currency for totals in spent_on}) > 1:
        return {"Fastest": fastest}
    cheapest = fitting[costs.index(min(costs))]
    if cheapest is fastest:
        return {"Cheapest and fastest": fastest}
    best = fitting[knee(spent_on)]
    heads = {"Best trade": best, "Cheapest": cheapest, "Fastest": fastest}
    same = next(
        (head for head, training in heads.items() if training is best and head != "Best trade"), ""
    )
    if same:
        del heads[same]
        heads = {f"{same}, and best trade": heads.pop("Best trade"), **heads}
    return heads


def where(result: Result) -> str:
    """A single case: its strategy and its GPUs."""
    return f"{result.strategy} on {counted(result.gpus, 'GPU')}"


def amount(value: float) -> str:
    """Days or money: three digits, and all before the point."""
    return f"{value:,.0f}" if value >= _LONG else f"{value:.3g}"


def short(tokens: float) -> str:
    """A large number as people type it: 1T, 250B, 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if tokens >= size:
            return f"{tokens / size:.4g}{letter}"
    return f"{tokens:,.12g}"


def _between(totals: Totals, name: str, unit: float = 1) -> str:
    """The interval of an amount in a sentence; nothing where an end is not known."""
    low, high = getattr(totals, f"{name}_low"), getattr(totals, f"{name}_high")
    if low is None or high is None or low == high:  # as what a contract bills at least
        return ""
    return f" (90 %: {amount(low / unit)} to {amount(high / unit)})"


_UNITS = ((86400.0, "days"), (3600.0, "h"), (60.0, "min"))
"""Units of times that are longer than two of them."""


def worth(results: Iterable[Result], goal: Goal = NO_GOAL) -> str:
    """What a step of local updates is worth, if there are any; else nothing."""
    return remark(((result.strategy, scale_of(result)) for result in results), goal)


def print_worth(out: Console, results: Iterable[Result], goal: Goal, *after: str) -> None:
    """What a step of local updates is worth, if there are any; then the lines `after` it."""
    if line := worth(results, goal):
        print_lines(out, line, *after)


def heads(results: Sequence[Result], goal: Goal) -> list[str]:
    """The columns of `cells`: none without a goal, and no cost where nothing has a price."""
    if goal.steps is None:
        return []
    priced = any(result.cost_per_billion_tokens is not None for result in results)
    return ["to loss", *(["cost to loss"] if priced else [])]


def cells(result: Result, goal: Goal) -> list[str]:
    """The time and the cost to the loss, "-" where a factor or a price is not known."""
    loss = to_loss(result, goal)
    if loss is None:
        return ["-", "-"]
    cost = "-" if loss.cost is None else f"{loss.cost:,.2f} {loss.currency}"
    return [_long(loss.time_s), cost]


def loss_rows(result: Result, goal: Goal) -> list[tuple[str, str]]:
    """The same as rows of a single result."""
    if goal.steps is None:
        return []
    what = f"time to the loss of {goal.steps:,} steps of ddp"
    loss = to_loss(result, goal)
    if loss is None:
        return [(what, "steps factor not known")]
    rows = [(what, f"{_long(loss.time_s)} ({loss.steps:,.0f} steps)")]
    if loss.cost is not None:
        rows.append((f"{loss.currency} to the same loss", f"{loss.cost:,.2f}"))
    return rows


def _long(seconds: Seconds) -> str:
    """A time that may be days."""
    for length, unit in _UNITS:
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return duration(seconds)
