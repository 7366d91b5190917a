"""`co2sim own`: owning beside renting: the answer, and with `--full` what it is made of."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from co2sim.catalog import Entry, Fact, load_cluster
from co2sim.catalog.facts import Rate
from co2sim.cli import options
from co2sim.common import convert
from co2sim.common.cli import print_json
from co2sim.common.errors import OptionError
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted, figures, number, scaled
from co2sim.common.validation import between
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import driver, power
from co2sim.prediction.figures import asked
from co2sim.prediction.ownership import (
    HOUR,
    SETS,
    TIERS,
    YEAR,
    Costs,
    Machine,
    Ownership,
    as_sold,
    costs_of,
    machine,
    moved,
    node_of,
    numbers,
    ownership,
    split,
    spread,
    usd_per_billion,
)
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.result import Result
from co2sim.report.text.result import question
from co2sim.report.text.screen import Screen, print_screen

_YEARS = (0.25, 20)
"""Least and most."""
_LEAST_USED = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """All that is said; `ends` is what owning is with each number at its ends."""

    cluster: Entry[Cluster]
    machine: Machine
    years: float
    given: Mapping[str, Rate]
    costs: Costs
    found: Ownership
    ends: Mapping[str, tuple[Ownership, Ownership]]
    result: Result | None

    @property
    def rent(self) -> float:
        """USD for a GPU-hour."""
        return self.costs.rent * HOUR

    @property
    def break_even(self) -> tuple[float, float]:
        """The range of the utilization at which owning wins."""
        pairs = ((low.break_even, high.break_even) for low, high in self.ends.values())
        return spread(self.found.break_even, pairs)

    @property
    def per_hour(self) -> tuple[float, float]:
        """The range of what a GPU-hour costs, used or not."""
        pairs = ((low.per_hour, high.per_hour) for low, high in self.ends.values())
        return spread(self.found.per_hour, pairs)

    @property
    def per_used_hour(self) -> tuple[float, float]:
        """The range of what a GPU-hour that is used costs."""
        pairs = ((low.per_used_hour, high.per_used_hour) for low, high in self.ends.values())
        return spread(self.found.per_used_hour, pairs)

    @property
    def billion(self) -> tuple[float, float] | None:
        """USD for a billion tokens, owning and renting; None without a model."""
        if self.result is None:
            return None
        gpus, speed = self.machine.gpus, self.result.tokens_per_s
        owned = usd_per_billion(self.found.per_used_hour, gpus, speed)
        return owned, usd_per_billion(self.rent, gpus, speed)


def _used(text: str) -> float:
    """A share such as 70% or 0.7."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not _LEAST_USED <= share <= 1:
        raise OptionError(f"--utilization is {text!r}; it must be 0.1% to 100%")
    return share


@options.case_options(
    "place",
    *("job", "pipeline", "simulation"),
    optional=("model", "strategy"),
    defaults=OPEN_BATCH,
)
def own(
    case: Question,
    years: Annotated[str, typer.Option(metavar="N", help="How long it is kept.")] = "3",
    utilization: Annotated[
        str,
        typer.Option(metavar="SHARE", help="The part of all hours in which GPUs are used."),
    ] = "70%",
    json_: options.Json = False,  # noqa: FBT002
    full: options.Full = False,  # noqa: FBT002
) -> None:
    """Compare owning a cluster with renting it; --set own.NAME=VALUE changes any number.

    With a model and a strategy also by token. `co2sim list ownership`, `list nodes` and
    `list electricity` show all numbers.
    """
    length = between("--years", convert.number("--years", years), *_YEARS)
    answer = _answer(case, length, _used(utilization))
    if json_:
        print_json(_plain(answer))
    elif full:
        _print(console(), answer)
    else:
        print_screen(_screen(answer))


def _answer(case: Question, years: float, utilization: float) -> _Answer:
    if bool(case.model) != bool(case.strategy):
        missing = "--strategy" if case.model else "--model"
        raise OptionError(f"{missing} is missing; what a token costs needs a model and a strategy")
    changes, others = split(case.overrides)
    case = replace(case, overrides=others)
    cluster, rent = _with_rent(case, changes)
    rates = numbers(cluster.value, changes, rent)
    costs = costs_of(rates)
    result = driver.run(case, progress=None) if case.model else None
    gpus, per_node = result.gpus if result else case.gpus, cluster.value.gpus_per_node
    if gpus is not None and gpus % per_node:
        raise OptionError(f"--gpus is {gpus}; whole nodes are bought: use a multiple of {per_node}")
    sized = cluster.value if gpus is None else cluster.value.resized(gpus)
    computing = 1.0 if result is None else power.computing_share(result)
    bought = machine(sized, computing, load_cluster(str(case.cluster), as_sold(others)).value)
    return _Answer(
        cluster=cluster,
        machine=bought,
        years=years,
        given=rates,
        costs=costs,
        found=ownership(costs, bought, years, utilization),
        ends={
            name: (
                ownership(low, bought, years, utilization),
                ownership(high, bought, years, utilization),
            )
            for name, (low, high) in moved(costs, rates).items()
        },
        result=result,
    )


def _with_rent(case: Question, changes: Mapping[str, str]) -> tuple[Entry[Cluster], Rate]:
    """The cluster of a case, and its price. Raises OptionError without one, or not in USD."""
    cluster = load_cluster(str(case.cluster), case.cluster_overrides)
    value = cluster.value
    if value.price_per_gpu is None:
        lacks_node = node_of(value) is None and "node" not in changes
        price = " nor price of a node" if lacks_node else ""
        sets = f", and --set {SETS}node='36000 USD' a GPU" if lacks_node else ""
        if lacking := power.missing(value):
            sets += f", and {power.sets(value, lacking)} (of a node without its GPUs)"
        raise OptionError(
            f"no rent{price} of {value.gpu.name} is known; give --set"
            f" price_per_gpu='2.5 USD/h' (or a name of `co2sim list prices`){sets}"
        )
    if value.currency != "USD":
        raise OptionError(
            f"the rent is in {value.currency}; owning is in USD: --set price_per_gpu='2.5 USD/h'"
        )
    price = f"{value.price_per_gpu * HOUR:.6g} USD/h"
    low, high = (
        None if end is None else f"{end * HOUR:.6g} USD/h"
        for end in (value.price_low, value.price_high)
    )
    source = next((f.source for f in cluster.facts if f.path == "price_per_gpu"), "")
    return cluster, Rate(name="rent", value=price, low=low, high=high, date="", source=source)


# --- what is printed -----------------------------------------------------------------------------


def _screen(answer: _Answer) -> Screen:
    """The answer in a few lines."""
    rent = answer.given["rent"]
    rows = [("cost", _cost(answer))]
    if trained := _trained(answer):
        rows.append(("speed", trained))
    rows += [
        ("counted", _COUNTED),
        ("turns", _resale(answer)),
        *([("turns", levers)] if (levers := _levers(answer)) else []),
        ("rent", f"{rent.value}{_ranged(rent)}: {rent.source.partition(':')[0] or 'given'}"),
    ]
    if old := _old(answer):
        rows.append(("dates", f"prices of more than two years ago: {old}"))
    if answer.result:
        batch = question([answer.result])[0]
        rows.insert(2, ("batch", batch.removeprefix("batch: ")))
    return Screen(answer=_sentences(answer), rows=rows)


def _print(out: Console, answer: _Answer) -> None:
    lines = [*_sentences(answer), _cost(answer), *_trained(answer).splitlines(), _resale(answer)]
    print_lines(out, *lines, *question([answer.result] if answer.result else []), "")
    owned = answer.found
    rows = [
        (name, _made_of(answer, name), f"{usd:,.0f}", f"{usd / owned.gpu_hours:.3f}")
        for name, usd in owned.parts.items()
    ]
    rows.append(("in all", "", f"{owned.total:,.0f}", f"{owned.per_hour:.3f}"))
    title = f"what owning costs in {_years(answer.years)}"
    heads = ["part", "made of", "USD", "USD per GPU-hour, used or not"]
    print_table(out, title, heads, rows, left=2)
    title = "numbers, and the utilization from which owning wins at the ends of each"
    heads = ["number", "value", "range", "owning wins from", "date", "source"]
    print_table(out, title, heads, _numbers(answer), left=6)
    print_lines(
        out,
        "sources in full: co2sim list nodes, ownership, electricity, prices, or a cluster;"
        f" another number: --set {SETS}node='36000 USD', say",
    )


def _sentences(answer: _Answer) -> list[str]:
    """The price of a contract, and the utilization, from which owning is cheaper."""
    found, cluster = answer.found, answer.cluster.value
    what = f"{counted(answer.machine.gpus, 'GPU')} ({cluster.gpu.name})"
    above = f"{found.per_hour:.2f} USD a GPU-hour{_between(answer.per_hour, '{:.2f}')}"
    what += f" for {_years(answer.years)}"
    lines = [f"Own {what} if a contract, every hour billed, costs more than {above}."]
    offered = cluster.bill(answer.years * YEAR)
    if offered and offered.committed:
        wins = "owning" if found.per_hour < offered.price_per_hour else "the contract"
        lines.append(
            f"This offer's costs {offered.price_per_hour:.2f} USD, as {offered.committed} are"
            f" committed: {wins} is cheaper."
        )
    ends = _between(answer.break_even, _share)
    rented = f"Against rent by the hour ({answer.rent:.2f} USD)"
    if found.break_even <= 1:
        lines.append(f"{rented} own from {_share(found.break_even)} utilization on{ends}.")
    elif math.isfinite(found.break_even):
        lines.append(f"{rented} do not: it would take {_share(found.break_even)} use{ends}.")
    else:
        lines.append(f"{rented} do not: electricity alone costs more{ends}.")
    return lines


_COUNTED = "all but storage, software, support, taxes, insurance, and rents that change meanwhile"


def _trained(answer: _Answer) -> str:
    """What a billion tokens cost; nothing without a model."""
    if answer.billion is None or answer.result is None:
        return ""
    owning, renting = answer.billion
    return (
        f"a billion {answer.result.unit}s of {answer.result.model} by {answer.result.strategy}:"
        f" {figures(owning)} USD owned, {figures(renting)} rented"
    )


def _cost(answer: _Answer) -> str:
    found = answer.found
    rented = found.gpu_hours * found.utilization * answer.rent
    return (
        f"at {_share(found.utilization)} utilization {_million(found.total)} owned,"
        f" {_million(rented)} rented by the hour; of a GPU-hour that is used"
        f" {found.per_used_hour:.2f} USD{_between(answer.per_used_hour, '{:.2f}')} and"
        f" {answer.rent:.2f}"
    )


def _resale(answer: _Answer) -> str:
    """How much rests on what is sold at the end, and with how much of it renting wins."""
    found = answer.found
    sold = -found.parts["sold at the end"]
    text = f"resale: for {_share(found.kept)} of what was paid at the end, {_million(sold)}"
    even = found.kept_to_win
    if even is None:
        return text
    use = f"at {_share(found.utilization)} utilization"
    if even >= 1:
        return f"{text}; {use} renting wins whatever is sold"
    if even <= 0:
        return f"{text}; {use} owning wins even if nothing is sold"
    cheaper = "below" if even <= found.kept else "only from"
    wins = "renting wins" if even <= found.kept else "owning wins"
    return f"{text}; {use} {wins} {cheaper} {_share(even)}"


def _levers(answer: _Answer) -> str:
    """The numbers whose ranges move the price of the contract most, but for the rent."""
    prices = {
        name: sorted(end.per_hour for end in ends)
        for name, ends in answer.ends.items()
        if name != "rent"
    }
    most = sorted(prices, key=lambda name: prices[name][0] - prices[name][1])[:_LEVERS]
    ranges = (
        f"{low:.2f} to {high:.2f} USD by {SETS}{name} ({_ends(answer.given[name])})"
        for name in most
        for low, high in [prices[name]]
    )
    return f"the price of that contract: {', '.join(ranges)}" if most else ""


_LEVERS = 2


def _old(answer: _Answer) -> str:
    """Which prices are too old to be today's, with their dates."""
    marked = {name: rate.dated().partition(",") for name, rate in answer.given.items() if rate.date}
    return ", ".join(f"{name} ({month})" for name, (month, old, _) in marked.items() if old)


def _between(ends: tuple[float, float], shown: Any) -> str:
    """A range behind its figure, by a format or a function; nothing where there is none."""
    low, high = ends
    write = shown.format if isinstance(shown, str) else shown
    return "" if low == high else f" ({write(low)} to {write(high)})"


def _ranged(rate: Rate) -> str:
    return f" ({_ends(rate)})" if rate.low else ""


def _made_of(answer: _Answer, part: str) -> str:
    """Amounts and prices of a part."""
    owned, bought, costs = answer.found, answer.machine, answer.costs
    values = {name: rate.value for name, rate in answer.given.items()}
    speed = scaled(bought.port_speed * 8, "bit/s")
    if part.endswith(" switches"):
        tiers = dict(zip(TIERS, owned.network.tiers, strict=False))
        ports = (bought.fabric and bought.fabric.switch_ports) or costs.switch_ports
        count = tiers[part.removesuffix(" switches")]
        return f"{count:,} of {ports} ports of {speed}{_drawn(owned, part)}"
    return {
        "nodes": f"{counted(bought.gpus, 'GPU')} in {counted(bought.nodes, 'node')} at"
        f" {values['node']} a GPU",
        "spare parts": f"{_share(costs.spares)} of the nodes",
        "network cards": f"{bought.ports} a node of {speed} instead of those that it is sold with"
        f"{_drawn(owned, part)}",
        "links": f"{owned.network.links:,} of {speed}, two modules and a fibre each",
        "colocation": f"{owned.power_kw:,.0f} kW at {values['colocation']}",
        "electricity": f"{owned.energy_kwh / 1000:,.0f} MWh at the meter, PUE {bought.pue:g}, at"
        f" {values['electricity']}",
        "staff": f"{number(owned.engineers)} at {costs.engineer * 31_557_600:,.0f} USD a year",
        "interest": f"{_share(costs.capital)} a year on the mean of purchase and resale",
        "sold at the end": f"{_share(costs.resale**answer.years)} of nodes, spares and network:"
        f" {_share(costs.resale)} is kept each year",
    }[part]


def _drawn(owned: Ownership, part: str) -> str:
    """What a part draws, behind others."""
    return f", {number(owned.power.get(part, 0.0))} kW"


def _numbers(answer: _Answer) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, rate in answer.given.items():
        wins = ""
        if name in answer.ends:
            wins = " to ".join(_share(end.break_even) for end in answer.ends[name])
        shown = "price_per_gpu" if name == "rent" else f"{SETS}{name}"
        ends = _ends(rate) if rate.low else ""
        dated = rate.dated() if rate.date else ""
        rows.append((shown, rate.value, ends, wins, dated, rate.source.partition(":")[0]))
    rows += [(fact.path, fact.value, "", "", "", _source(fact)) for fact in _powers(answer)]
    return rows


def _powers(answer: _Answer) -> list[Fact]:
    """What the power rests on."""
    return [fact for fact in answer.cluster.facts if fact.path in power.NEEDED]


def _source(fact: Fact) -> str:
    head = fact.source.partition(":")[0]
    return f"assumed: {head}" if fact.assumed and head != "assumed" else head


def _ends(rate: Rate) -> str:
    (low, *unit), high = str(rate.low).split(maxsplit=1), str(rate.high)
    return f"{low} to {high}" if high.endswith(" ".join(unit)) else f"{rate.low} to {high}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %" if math.isfinite(value) else "never"


def _years(years: float) -> str:
    return "1 year" if years == 1 else f"{years:g} years"


def _million(usd: float) -> str:
    return f"{number(usd / 1e6)} million USD" if usd >= 1e6 else f"{usd:,.0f} USD"  # noqa: PLR2004


def _plain(answer: _Answer) -> dict[str, Any]:
    """As plain values for JSON; what is infinite is None."""
    owned, bought = answer.found, answer.machine
    break_even, used = answer.break_even, answer.per_used_hour
    billion = answer.billion
    return {
        "cluster": answer.cluster.value.name,
        "answer": " ".join(_sentences(answer)),
        "gpus": bought.gpus,
        "nodes": bought.nodes,
        "years": answer.years,
        "utilization": owned.utilization,
        "contract_usd_per_gpu_hour": owned.per_hour,
        "contract_usd_per_gpu_hour_low": answer.per_hour[0],
        "contract_usd_per_gpu_hour_high": answer.per_hour[1],
        "resale_share": owned.kept,
        "resale_share_to_win": owned.kept_to_win,
        "break_even": owned.break_even,
        "break_even_low": break_even[0],
        "break_even_high": break_even[1],
        "usd": owned.total,
        "usd_per_used_gpu_hour": owned.per_used_hour,
        "usd_per_used_gpu_hour_low": used[0],
        "usd_per_used_gpu_hour_high": used[1],
        "rent_usd_per_gpu_hour": answer.rent,
        "trained": answer.result and {"strategy": answer.result.strategy, **asked(answer.result)},
        "usd_per_billion_tokens": billion and {"owning": billion[0], "renting": billion[1]},
        "parts": dict(owned.parts),
        "network": asdict(owned.network),
        "power_kw": owned.power_kw,
        "power_kw_of": dict(owned.power),
        "energy_kwh": owned.energy_kwh,
        "engineers": owned.engineers,
        "numbers": {name: asdict(rate) for name, rate in answer.given.items()},
        "power_numbers": [asdict(fact) for fact in _powers(answer)],
    }
