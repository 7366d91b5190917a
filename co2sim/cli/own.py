"""`co2sim own`: owning beside renting, as sentences, and a table of what it is made of."""

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
    Costs,
    Machine,
    Ownership,
    costs_of,
    machine,
    moved,
    node_of,
    numbers,
    ownership,
    spread,
    usd_per_billion,
)
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.result import Result
from co2sim.report.text.result import question

_YEARS = (0.25, 20)
"""Least and most."""
_LEAST_USED = 0.001


_OWN = "own."


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
) -> None:
    """Compare owning a cluster with renting it; --set own.NAME=VALUE changes any number.

    With a model and a strategy also by token. `co2sim list ownership`, `list nodes` and
    `list electricity` show all numbers.
    """
    length = between("--years", convert.number("--years", years), *_YEARS)
    answer = _answer(case, length, _used(utilization))
    if json_:
        print_json(_plain(answer))
    else:
        _print(console(), answer)


def _answer(case: Question, years: float, utilization: float) -> _Answer:
    if bool(case.model) != bool(case.strategy):
        missing = "--strategy" if case.model else "--model"
        raise OptionError(f"{missing} is missing; what a token costs needs a model and a strategy")
    sets = case.overrides
    changes = {k.removeprefix(_OWN): v for k, v in sets.items() if k.startswith(_OWN)}
    case = replace(case, overrides={k: v for k, v in sets.items() if not k.startswith(_OWN)})
    case, cluster, rent = _with_rent(case, changes)
    rates = numbers(cluster.value, changes, rent)
    costs = costs_of(rates)
    result = driver.run(case, progress=None) if case.model else None
    gpus, per_node = result.gpus if result else case.gpus, cluster.value.gpus_per_node
    if gpus is not None and gpus % per_node:
        raise OptionError(f"--gpus is {gpus}; whole nodes are bought: use a multiple of {per_node}")
    sized = cluster.value if gpus is None else cluster.value.resized(gpus)
    bought = machine(sized, 1.0 if result is None else power.computing_share(result))
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


def _with_rent(case: Question, changes: Mapping[str, str]) -> tuple[Question, Entry[Cluster], Rate]:
    """The case with a price, its cluster, and the price: its own, else that of its GPU's entry."""
    cluster = load_cluster(str(case.cluster), case.cluster_overrides)
    if cluster.value.price_per_gpu is None:
        node = node_of(cluster.value)
        if node is None or node.rent is None:
            price = "" if "node" in changes else " nor price of a node"
            sets = "" if "node" in changes else f", and --set {_OWN}node='36000 USD' a GPU"
            if cluster.value.node_power is None:
                sets += ", and --set node_power='2.8 kW' (of a node without its GPUs)"
            raise OptionError(
                f"no rent{price} of {cluster.value.gpu.name} is known; give --set"
                f" price_per_gpu='2.5 USD/h' (or a name of `co2sim list prices`){sets}"
            )
        case = replace(case, overrides={**case.overrides, "price_per_gpu": node.rent})
        cluster = load_cluster(str(case.cluster), case.cluster_overrides)
    value = cluster.value
    if value.currency != "USD":
        raise OptionError(
            f"the rent is in {value.currency}; owning is in USD: --set price_per_gpu='2.5 USD/h'"
        )
    assert value.price_per_gpu is not None
    price = f"{value.price_per_gpu * HOUR:.6g} USD/h"
    low, high = (
        None if end is None else f"{end * HOUR:.6g} USD/h"
        for end in (value.price_low, value.price_high)
    )
    source = next((f.source for f in cluster.facts if f.path == "price_per_gpu"), "")
    return case, cluster, Rate(name="rent", value=price, low=low, high=high, date="", source=source)


# --- what is printed -----------------------------------------------------------------------------


def _print(out: Console, answer: _Answer) -> None:
    print_lines(out, *_sentences(answer), *question([answer.result] if answer.result else []), "")
    owned = answer.found
    rows = [
        (name, _made_of(answer, name), f"{usd:,.0f}", f"{usd / owned.gpu_hours:.3f}")
        for name, usd in owned.parts.items()
    ]
    rows.append(("in all", "", f"{owned.total:,.0f}", f"{owned.total / owned.gpu_hours:.3f}"))
    title = f"what owning costs in {_years(answer.years)}"
    heads = ["part", "made of", "USD", "USD per GPU-hour, used or not"]
    print_table(out, title, heads, rows, left=2)
    title = "numbers, and the utilization from which owning wins at the ends of each"
    heads = ["number", "value", "range", "owning wins from", "date", "source"]
    print_table(out, title, heads, _numbers(answer), left=6)
    print_lines(
        out,
        "sources in full: co2sim list nodes, ownership, electricity, prices, or a cluster;"
        f" another number: --set {_OWN}node='36000 USD', say",
    )


def _sentences(answer: _Answer) -> list[str]:
    found, bought, rent = answer.found, answer.machine, answer.given["rent"]
    low, high = answer.break_even
    ends = "" if low == high else f" (range {_share(low)} to {_share(high)})"
    if found.break_even <= 1:
        first = "Owning is cheaper than renting where GPUs are used"
        first += f" {_share(found.break_even)} of the time or more{ends}"
    elif math.isfinite(found.break_even):
        first = "Renting is cheaper than owning at every utilization: owning would need"
        first += f" {_share(found.break_even)} of the time{ends}"
    else:
        first = f"Renting is cheaper than the electricity of owning{ends}"
    low, high = answer.per_used_hour
    owned = f"{found.per_used_hour:.2f} USD"
    owned += "" if low == high else f" ({low:.2f} to {high:.2f})"
    rented = f"{answer.rent:.2f} USD"
    rented += f" ({_ends(rent)})" if rent.low else ""
    used = found.gpu_hours * found.utilization
    kept = f"{counted(bought.gpus, 'GPU')} ({answer.cluster.value.gpu.name})"
    kept += f" for {_years(answer.years)}, used {_share(found.utilization)} of the time"
    lines = [
        f"{first}.",
        f"{kept} (--utilization):",
        f"- owned, a GPU-hour that is used costs {owned}, in all {_million(found.total)};",
        f"- rented, it costs {rented}, in all {_million(used * answer.rent)}.",
    ]
    if answer.billion and answer.result:
        owning, renting = answer.billion
        lines.append(
            f"A billion {answer.result.unit}s of {answer.result.model} by {answer.result.strategy}:"
            f" {figures(owning)} USD owning, {figures(renting)} USD renting."
        )
    each = found.total / found.gpu_hours
    lines.append(
        f"If a contract bills every hour, used or not, owning is cheaper where it costs more than"
        f" {each:.2f} USD a GPU-hour."
    )
    return lines


def _made_of(answer: _Answer, part: str) -> str:
    """Amounts and prices of a part."""
    owned, bought, costs = answer.found, answer.machine, answer.costs
    values = {name: rate.value for name, rate in answer.given.items()}
    speed = scaled(bought.port_speed * 8, "bit/s")
    tiers = " + ".join(f"{count:,}" for count in owned.network.tiers) or "none"
    return {
        "nodes": f"{counted(bought.gpus, 'GPU')} in {counted(bought.nodes, 'node')} at"
        f" {values['node']} a GPU",
        "spare parts": f"{_share(costs.spares)} of the nodes",
        "switches": f"{tiers} of {costs.switch_ports} ports of {speed}, a tree without blocking",
        "links": f"{owned.network.links:,} of {speed}, two modules and a fibre each",
        "colocation": f"{owned.power_kw:,.0f} kW at {values['colocation']}",
        "electricity": f"{owned.energy_kwh / 1000:,.0f} MWh at the meter, PUE {bought.pue:g}, at"
        f" {values['electricity']}",
        "staff": f"{number(owned.engineers)} at {costs.engineer * 31_557_600:,.0f} USD a year",
        "interest": f"{_share(costs.capital)} a year on the mean of purchase and resale",
        "sold at the end": f"{_share(costs.resale**answer.years)} of nodes, spares and network:"
        f" {_share(costs.resale)} is kept each year",
    }[part]


def _numbers(answer: _Answer) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, rate in answer.given.items():
        wins = ""
        if name in answer.ends:
            wins = " to ".join(_share(end.break_even) for end in answer.ends[name])
        shown = "price_per_gpu" if name == "rent" else f"{_OWN}{name}"
        ends = _ends(rate) if rate.low else ""
        rows.append((shown, rate.value, ends, wins, rate.date, rate.source.partition(":")[0]))
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
        "energy_kwh": owned.energy_kwh,
        "engineers": owned.engineers,
        "numbers": {name: asdict(rate) for name, rate in answer.given.items()},
        "power_numbers": [asdict(fact) for fact in _powers(answer)],
    }
