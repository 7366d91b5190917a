"""Tables of the options of a plan, of what would change the answer, and of useful time."""

from collections.abc import Iterable, Mapping, Sequence

from co2sim.decide.break_even import BreakEven
from co2sim.decide.wanted import Candidate
from co2sim.goodput.of_result import goodput_of
from co2sim.grid import label
from co2sim.report.answered import Answered
from co2sim.report.tables import Table, ranged
from co2sim.totals import Totals
from co2sim.units import scaled

_PARTS = {
    "useful": "useful work",
    "checkpoint": "stops for checkpoints",
    "lost": "work that is done again",
    "restart": "restarts",
    "waiting": "waiting for nodes",
}
"""Shares of the time where parts fail."""


def spent(options: Sequence[Candidate]) -> Table:
    """What each option takes: days, GPU-hours, and money and energy where they are known."""
    money = next((o.totals.currency for o in options if o.totals.currency), None)
    energy = any(option.totals.energy_kwh is not None for option in options)
    columns = ["cluster", "strategy", "recompute", "GPUs", "micro-batch", "days", "GPU-hours"]
    columns += [money] if money else []
    columns += ["kWh"] if energy else []
    columns += ["memory of a GPU"]
    return Table(columns, [_option(one, bool(money), energy) for one in options], 3)


def _option(option: Candidate, money: bool, energy: bool) -> list[str]:  # noqa: FBT001
    case, found, result = option.case, option.totals, option.result
    row = [
        *(label(case.cluster), result.strategy, case.recompute),
        *(f"{result.gpus:,}", f"{case.micro_batch} x {result.accumulation}"),
        ranged(found.days, found.days_low, found.days_high),
        f"{found.gpu_hours:,.0f}",
    ]
    row += [ranged(found.cost, found.cost_low, found.cost_high)] if money else []
    row += [_energy(found)] if energy else []
    return [*row, scaled(result.memory_bytes_per_gpu["total"], "B")]


def breaks(found: Iterable[BreakEven]) -> Table:
    """Where each number turns the answer."""
    rows = [
        [
            turn.what,
            turn.shown_now,
            f"{'above' if turn.above else 'below'} {turn.shown_at}",
            f"{turn.at / turn.now:.3g}",
        ]
        for turn in found
    ]
    return Table(("number", "now", "the runner-up wins", "times what it is now"), rows)


def useful(named: Mapping[str, Answered]) -> Table | None:
    """What becomes of the time, and energy, a column for each; None where neither is known."""
    rows = []
    shares = [_shares(one) for one in named.values()]
    for part, words in _PARTS.items():
        if any(shares):
            cells = [f"{found[part]:.2%}" if found else "-" for found in shares]
            rows.append([f"share of the time: {words}", *cells])
    totals = [one.totals for one in named.values() if one.totals]
    if any(one.power_w is not None for one in totals):
        power = ["-" if one.power_w is None else scaled(one.power_w, "W") for one in totals]
        rows.append(["average power, at the meter", *power])
        rows.append(["energy, kWh", *map(_energy, totals)])
    if any(one.co2e_kg is not None for one in totals):
        carbon = [ranged(one.co2e_kg, one.co2e_kg_low, one.co2e_kg_high) for one in totals]
        rows.append(["carbon, kg CO2e", *carbon])
    heads = [f"{words}: {one.strategy}" if words else one.strategy for words, one in named.items()]
    return Table(("of the training", *heads), rows) if rows else None


def _shares(one: Answered) -> dict[str, float] | None:
    cluster, model = one.case.load()
    found = goodput_of(one.result, cluster.value, model.value, optimizer=one.case.optimizer)
    return None if found is None else {name: getattr(found.shares, name) for name in _PARTS}


def _energy(found: Totals) -> str:
    return ranged(found.energy_kwh, found.energy_kwh_low, found.energy_kwh_high)
