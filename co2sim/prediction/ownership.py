"""What it costs to own a cluster, beside renting it by the hour that is used.

Pure functions over numbers. In H hours of all GPUs, of which the part u is used,

    owning = fixed + u * used,   renting = u * H * price

`fixed` is what nodes, spare parts, network, place, staff, interest and the electricity of waiting
cost, less what can be sold at the end; `used` is the electricity that work draws beyond waiting.
Both are equal at u = fixed / (H * price - used): above it owning is cheaper. Where that is above 1,
or H * price is no more than `used`, renting always is. A contract bills every hour, used or not:
owning is cheaper than one whose price is above owning / H.

Interest is paid on what is bought, which loses its value evenly: on half of what it costs and what
it is sold for, together. All money is USD of today: inflation is left out. So are taxes,
insurance, storage, a network to the outside, and software.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, get_args, get_type_hints

from co2sim.catalog.facts import Rate, rates, read
from co2sim.common.errors import OptionError, UnitError, nearest
from co2sim.common.units import BytesPerSecond, Seconds, Watts, parse
from co2sim.common.validation import Price, Quantity, check, fraction
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.fabric import Fabric, Network, network
from co2sim.prediction import power

YEAR: Seconds = 31_557_600.0
HOUR: Seconds = 3600.0
_GBIT: BytesPerSecond = 1e9 / 8
_KNOWN_SPEED: BytesPerSecond = 400 * _GBIT
"""Of the ports whose price is known."""
_SPEEDS = tuple(speed * _GBIT for speed in (1, 10, 25, 50, 100, 200, 400, 800))
"""Of ports that are sold."""
TIERS = ("leaf", "spine", "core")
"""Of switches, from the nodes on."""
SETS = "own."
"""What names of the numbers of owning begin with among changes of a cluster."""

REGION = "virginia"
"""Where the electricity is from, unless another region or price is given."""

Usd = Annotated[float, Quantity(unit="USD", least=0)]
Share = Annotated[float, Quantity(least=0, most=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The numbers of owning: `co2sim list ownership`, `nodes` and `electricity` say what each is.

    `node` is that of one GPU and its part of a node, `rent` that of a GPU per second of use.
    Raises OptionError for a number out of range.
    """

    node: Usd
    nic: Usd
    nic_power: Annotated[Watts, Quantity(unit="W", least=0)]
    switch: Usd
    switch_ports: Annotated[int, Quantity(least=4, most=1024)]
    switch_power: Annotated[Watts, Quantity(unit="W", least=0)]
    link: Usd
    colocation: Annotated[float, Quantity(unit="USD/kW/month", least=0)]
    electricity: Annotated[float, Quantity(unit="USD/kWh", least=0)]
    gpus_per_engineer: Annotated[float, Quantity(least=1)]
    engineer: Price
    spares: Share
    resale: Share
    capital: Share
    rent: Price

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        check(self, "own")


@dataclass(frozen=True, slots=True)
class Cards:
    """Network cards of a node, and the speed of each."""

    count: int
    speed: BytesPerSecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is bought, and what it draws. `fabric` joins its nodes.

    `ports` are those of one node, of `port_speed` each: its network cards. The price of a node and
    its power are with the cards that are `sold` with it, these if None. The powers are those of one
    GPU that works as in training, that waits, and at most, and of what a node draws besides.
    """

    gpus: int
    nodes: int
    ports: int
    port_speed: BytesPerSecond
    sites: int
    working: Watts
    waiting: Watts
    most: Watts
    node_power: Watts
    pue: float
    fabric: Fabric | None = None
    sold: Cards | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """What all of one kind cost, and draw."""

    usd: float
    watts: Watts


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """What owning costs in all, in USD by part: what is sold at the end is below 0.

    `paid` is what all is bought for. `power` is what is drawn at most, in kW by part. Network cards
    are only what they are more than those that nodes are sold with. `gpu_hours` pass, of which the
    part `utilization` is used. `break_even` is the utilization above which owning is cheaper than
    renting; above 1, or infinite, where renting always is. `kept` is the part of what was paid that
    is sold at the end, and with `kept_to_win` of it owning costs as much as renting at this
    utilization: below it renting is cheaper. None where interest is more than what is sold.
    """

    parts: Mapping[str, float]
    paid: float
    network: Network
    power: Mapping[str, float]
    energy_kwh: float
    engineers: float
    gpu_hours: float
    utilization: float
    break_even: float
    kept: float
    kept_to_win: float | None

    @property
    def power_kw(self) -> float:
        """What all draws at most."""
        return sum(self.power.values())

    @property
    def total(self) -> float:
        """USD in all."""
        return sum(self.parts.values())

    @property
    def per_hour(self) -> float:
        """USD for a GPU-hour, used or not: of a contract that is dearer, owning is cheaper."""
        return self.total / self.gpu_hours

    @property
    def per_used_hour(self) -> float:
        """USD for a GPU-hour that is used."""
        return self.total / (self.gpu_hours * self.utilization)


def machine(cluster: Cluster, computing: float = 1.0, sold: Cluster | None = None) -> Machine:
    """What a cluster is made of; its GPUs compute for this part of the time that they are used.

    Every node has as many ports as its network cards need: one of each GPU, if they suffice. Where
    the fabric says how many cards it has, its price is that of a node of the cluster `sold`, with
    other cards. Raises OptionError where its powers are not known.
    """
    if lacking := power.missing(cluster):
        are = "is" if len(lacking) == 1 else "are"
        raise OptionError(
            f"{' and '.join(lacking)} {are} not known; give {power.sets(cluster, lacking)}, say"
        )
    gpu, layout = cluster.gpu, cluster.layout
    working, waiting = power.gpu_power(gpu, computing), power.gpu_power(gpu, 0.0)
    assert working is not None
    assert waiting is not None
    assert gpu.tdp is not None
    assert cluster.node_power is not None
    assert cluster.pue is not None
    cards = _cards(cluster)
    chosen = sold is not None and cluster.fabric is not None and cluster.fabric.nics is not None
    return Machine(
        gpus=layout.world_size,
        nodes=layout.nodes,
        ports=cards.count,
        port_speed=cards.speed,
        sites=cluster.sites,
        working=working,
        waiting=waiting,
        most=gpu.power_cap or gpu.tdp,
        node_power=cluster.node_power,
        pue=cluster.pue,
        fabric=cluster.fabric,
        sold=_cards(sold) if sold and chosen else None,
    )


def _cards(cluster: Cluster) -> Cards:
    """Those of a node, as they are sold."""
    share = cluster.inter.bandwidth / cluster.cards
    speed = next((sold for sold in _SPEEDS if sold >= share * (1 - 1e-9)), _SPEEDS[-1])
    return Cards(math.ceil(cluster.inter.bandwidth / speed * (1 - 1e-9)), speed)


def network_of(costs: Costs, bought: Machine) -> Network:
    """The switches and links between the nodes of every site; none for a single node."""
    nodes = bought.nodes // bought.sites
    if nodes == 1:
        return Network()
    speed = bought.port_speed
    of_site = network(bought.fabric, nodes, bought.ports, speed, costs.switch_ports)
    return Network(tuple(n * bought.sites for n in of_site.tiers), of_site.links * bought.sites)


def network_parts(costs: Costs, bought: Machine) -> dict[str, Part]:
    """What joins the nodes: all network cards, links, and switches by tier; none of one node.

    The modules of links draw what switches and cards do. Raises OptionError like `network`.
    """
    network, scale = network_of(costs, bought), bought.port_speed / _KNOWN_SPEED
    if not network.links:
        return {}
    cards = _of_cards(costs, Cards(bought.ports, bought.port_speed), bought.nodes)
    parts = {"network cards": cards, "links": Part(network.links * costs.link * scale, 0.0)}
    for tier, count in zip(TIERS, network.tiers, strict=False):
        switches = Part(count * costs.switch * scale, count * costs.switch_power)
        parts[f"{tier} switches"] = switches
    return parts


def _of_cards(costs: Costs, cards: Cards, nodes: int) -> Part:
    """Those of all nodes. Of other speeds the price is as the root of the speed."""
    count = cards.count * nodes
    return Part(count * costs.nic * math.sqrt(cards.speed / _KNOWN_SPEED), count * costs.nic_power)


def _network_beside(costs: Costs, bought: Machine) -> dict[str, Part]:
    """The parts of the network that are not sold with nodes; cards are more or fewer than those."""
    parts = network_parts(costs, bought)
    cards = parts.pop("network cards", None)
    if cards and bought.sold:
        usual = _of_cards(costs, bought.sold, bought.nodes)
        more = Part(cards.usd - usual.usd, cards.watts - usual.watts)
        return ({"network cards": more} if more != Part(0.0, 0.0) else {}) | parts
    return parts


def ownership(costs: Costs, bought: Machine, years: float, utilization: float) -> Ownership:
    """What it costs to own a machine for some years. Raises OptionError like `network`."""
    utilization = fraction("utilization", utilization)
    hours, joining = years * YEAR / HOUR, _network_beside(costs, bought)
    nodes = bought.gpus * costs.node
    with_cards = nodes + (joining["network cards"].usd if "network cards" in joining else 0.0)
    parts = {"nodes": nodes, "spare parts": with_cards * costs.spares}
    parts |= {name: part.usd for name, part in joining.items()}
    paid = sum(parts.values())
    kept = costs.resale**years
    sold = paid * kept
    rest = bought.nodes * bought.node_power + sum(part.watts for part in joining.values())
    drawn = {"nodes": bought.gpus * bought.most + bought.nodes * bought.node_power}
    drawn |= {name: part.watts for name, part in joining.items() if part.watts}
    power_kw = {name: watts / 1000 for name, watts in drawn.items()}
    most_kw = sum(power_kw.values())
    to_kwh = bought.pue * hours / 1000
    waiting_kwh = to_kwh * (bought.gpus * bought.waiting + rest)
    used_kwh = to_kwh * bought.gpus * (bought.working - bought.waiting)
    engineers = bought.gpus / costs.gpus_per_engineer
    parts |= {
        "colocation": most_kw * costs.colocation * 12 * years,
        "electricity": waiting_kwh * costs.electricity,
        "staff": engineers * costs.engineer * years * YEAR,
        "interest": costs.capital * years * (paid + sold) / 2,
        "sold at the end": -sold,
    }
    gpu_hours = bought.gpus * hours
    room = gpu_hours * costs.rent * HOUR - used_kwh * costs.electricity
    fixed = sum(parts.values())
    parts["electricity"] += utilization * used_kwh * costs.electricity
    saving = utilization * gpu_hours * costs.rent * HOUR - sum(parts.values())
    by_kept = paid * (1 - costs.capital * years / 2)  # what owning costs less if all is sold
    return Ownership(
        parts=parts,
        paid=paid,
        network=network_of(costs, bought),
        power=power_kw,
        energy_kwh=waiting_kwh + utilization * used_kwh,
        engineers=engineers,
        gpu_hours=gpu_hours,
        utilization=utilization,
        break_even=fixed / room if room > 0 else math.inf,
        kept=kept,
        kept_to_win=kept - saving / by_kept if by_kept > 0 else None,
    )


# --- the numbers, and how far each may be off ----------------------------------------------------


@cache
def _units() -> Mapping[str, Any]:
    """The unit of every field of `Costs`."""
    hints = get_type_hints(Costs, include_extras=True)
    return {field.name: get_args(hints[field.name])[1].unit for field in fields(Costs)}


def split(changes: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Changes of the numbers of owning, by name without `own.`, and all others."""
    owning = {n.removeprefix(SETS): text for n, text in changes.items() if n.startswith(SETS)}
    return owning, {n: text for n, text in changes.items() if not n.startswith(SETS)}


def numbers(cluster: Cluster, changes: Mapping[str, str], rent: Rate) -> dict[str, Rate]:
    """All numbers of owning a cluster by name, with range, date and source.

    `changes` are a user's: `electricity` may be the name of a region. They have no range. Raises
    OptionError for unknown names, and where the price of a node is not known.
    """
    published = dict(rates("ownership"))
    settable = [f"{SETS}{name}" for name in _units() if name != "rent"]
    for name in changes:
        if f"own.{name}" not in settable:
            raise OptionError(f"unknown number own.{name}; {nearest(f'own.{name}', settable)}")
    region = changes.get("electricity", REGION)
    if region in rates("electricity"):
        changes = {name: text for name, text in changes.items() if name != "electricity"}
        published["electricity"] = rates("electricity")[region]
    elif region.strip()[:1].isalpha():
        regions = nearest(region, rates("electricity"))
        raise OptionError(
            f"unknown region {region!r}; {regions} (a price: --set own.electricity='0.08 USD/kWh')"
        )
    changed = {
        name: Rate(name=name, value=text, date="", source="set by the user")
        for name, text in changes.items()
    }
    node = node_of(cluster)
    chosen = ({"node": node} if node else {}) | published | {"rent": rent} | changed
    if "node" not in chosen:
        raise OptionError(
            f"no price of a node of {cluster.gpu.name} is known; give what one GPU costs with its"
            " part of a node, --set own.node='36000 USD'"
        )
    return {name: chosen[name] for name in _units()}


def as_sold(changes: Mapping[str, str]) -> dict[str, str]:
    """Changes of a cluster but for its network: what is left are nodes as they are sold."""
    return {n: t for n, t in changes.items() if not n.startswith(("fabric.", "inter.", SETS))}


def node_of(cluster: Cluster) -> Rate | None:
    """The price of a GPU of a cluster with its part of a node, if one is known."""
    prices = rates("nodes").items()
    return next(
        (rate for key, rate in prices if read("gpus", key)["name"] == cluster.gpu.name), None
    )


def amount(name: str, text: str) -> float:
    """A number of owning as `Costs` has it. Raises OptionError that names it."""
    try:
        return parse(text, _units()[name])
    except UnitError as error:
        raise OptionError(f"own.{name}: {error}") from None


def costs_of(chosen: Mapping[str, Rate]) -> Costs:
    """The values of these numbers. Raises OptionError for what is none."""
    values: dict[str, Any] = {name: amount(name, rate.value) for name, rate in chosen.items()}
    return Costs(**values)


def moved(costs: Costs, chosen: Mapping[str, Rate]) -> dict[str, tuple[Costs, Costs]]:
    """By number with a range: the costs at its low and at its high end, all others as they are."""

    def with_value(name: str, text: str) -> Costs:
        change: dict[str, Any] = {name: amount(name, text)}
        return replace(costs, **change)

    return {
        name: (with_value(name, rate.low), with_value(name, rate.high))
        for name, rate in chosen.items()
        if rate.low is not None and rate.high is not None
    }


def spread(middle: float, ends: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The range of a figure whose numbers are off independently of each other.

    `ends` are what it is at both ends of each number; infinite where it has no bound. What they add
    up to is the root of the squares of their logarithms, downwards and upwards apart.
    """
    if not 0 < middle < math.inf:
        all_ = [middle, *chain.from_iterable(ends)]
        return min(all_), max(all_)
    down, up = 0.0, 0.0
    for pair in ends:
        logs = [math.log(end / middle) if end else -math.inf for end in pair]
        down += min(0.0, *logs) ** 2
        up += max(0.0, *logs) ** 2
    return middle * math.exp(-math.sqrt(down)), middle * math.exp(math.sqrt(up))


def usd_per_billion(per_hour: float, gpus: int, tokens_per_s: float) -> float:
    """USD for a billion tokens, by the USD for a GPU-hour."""
    return per_hour / HOUR * gpus / tokens_per_s * 1e9
