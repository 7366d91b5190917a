"""The fabric: tiers of switches between nodes, how flows choose paths, and where a job stands.

Tiers are counted from the nodes on. Leaves join nodes, spines join leaves, and core switches join
pods of spines. A dragonfly is a tier as well: its groups are the pods, and its global links their
uplinks.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from co2sim.common.errors import OptionError
from co2sim.common.units import BytesPerSecond
from co2sim.common.validation import Bandwidth, Count, Fraction, Quantity, check

Paths = Literal["spread", "hashed"]
"""spread: packets of a flow take all uplinks equally. hashed: a flow takes one of them (ECMP)."""

Placement = Literal["packed", "scattered", "cyclic"]
"""packed: ranks in the order of leaves. scattered: in any order, so that neighbours stand anywhere.
cyclic: in turn on all leaves, so that neighbours never share one."""

Part = Annotated[float, Quantity(least=0, most=0.99)]
MOST_SLOWER = 1000
"""What uplinks may be slower by than what they join: far beyond all that is built."""
Oversubscription = Annotated[float, Quantity(least=0.1, most=MOST_SLOWER)]
"""Below 1 uplinks have more than the nodes need, as where hashed paths shall seldom meet."""
Congestion = Annotated[float, Quantity(least=1, most=MOST_SLOWER)]
Ports = Annotated[int, Quantity(least=4, most=1024)]


@dataclass(frozen=True, slots=True)
class Tier:
    """Switches that join `nodes` nodes, a pod: what leaves it passes their uplinks.

    The uplinks have the bandwidth of all nodes of the pod, divided by `oversubscription`; others
    take the part `background` of it. Traffic that leaves the pod attains the bandwidth of its
    network cards, divided by `congestion`. `speed` is that of an uplink, which matters to hashed
    paths; as that of a network card if left out. Without `nodes` a switch joins as many as its
    ports allow.
    """

    nodes: Count | None = None
    oversubscription: Oversubscription = 1.0
    congestion: Congestion = 1.0
    speed: Bandwidth | None = None
    background: Part = 0.0

    def __post_init__(self) -> None:
        """Refuse what no switch can be."""
        check(self, "tier")


@dataclass(frozen=True, slots=True)
class Fabric:
    """The switches between the nodes of a site; without tiers, one switch that blocks nothing.

    `leaf` and `spine` are those that have uplinks: two tiers of switches have only the former.
    `nics` are the network cards of a node; with `rails` each has its own leaf, so that a pod has as
    many times the nodes, and data for other cards cross the node first. A card has `flows`
    connections at a time to a peer; if left out, the channels of NCCL divided by the cards. The job
    has the part `share` of the nodes of each leaf.
    """

    leaf: Tier | None = None
    spine: Tier | None = None
    switch_ports: Ports | None = None
    nics: Count | None = None
    rails: bool = False
    paths: Paths = "spread"
    flows: Count | None = None
    placement: Placement = "packed"
    share: Fraction = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        check(self, "fabric")
        if self.spine and not self.leaf:
            raise OptionError("fabric: leaf is missing; it must be there where there is a spine")
        for name, tier in (("leaf", self.leaf), ("spine", self.spine)):
            if tier and tier.nodes is None and self.switch_ports is None:
                raise OptionError(
                    f"fabric.{name}: nodes is missing; it must be there without fabric.switch_ports"
                )
        if not self.leaf and (self.share < 1 or not self.packed):
            raise OptionError(
                "fabric: leaf is missing; it must be there where share or placement is given"
            )

    @property
    def packed(self) -> bool:
        """Whether ranks stand in the order of leaves."""
        return self.placement == "packed"


@dataclass(frozen=True, slots=True)
class Pod:
    """A tier on nodes with `cards` network cards: it joins `nodes`, of which the job has `ours`.

    It has `switches`, each with `down` ports and `uplinks`, over which flows are hashed apart. All
    uplinks together have the bandwidth of `bandwidth` nodes.
    """

    tier: Tier
    fabric: Fabric
    cards: int
    nodes: int
    ours: int
    switches: int
    down: int
    uplinks: int
    bandwidth: float


def network_cards(fabric: Fabric | None, bandwidth: BytesPerSecond, gpus: int) -> int:
    """Network cards of a node: one for each of its GPUs, if 400 Gbit/s for each suffice."""
    if fabric and fabric.nics:
        return fabric.nics
    return min(gpus, math.ceil(bandwidth / _CARD))


_CARD: BytesPerSecond = 50e9
"""400 Gbit/s: cards of nodes that are sold are not slower where they have fewer than GPUs."""


MOST_CARDS = 8
"""Network cards for each GPU of a node: a p5.48xlarge of AWS has 4, 32 for 8 GPUs."""


@lru_cache(256)
def pods(fabric: Fabric, bandwidth: BytesPerSecond, cards: int) -> tuple[Pod, ...]:
    """The tiers with uplinks, on nodes with `cards` network cards of `bandwidth` together.

    Raises OptionError for switches whose ports do not suffice.
    """
    made: list[Pod] = []
    for name, tier in (("leaf", fabric.leaf), ("spine", fabric.spine)):
        if tier:
            below = made[-1] if made else None
            made.append(_wired(fabric, name, tier, below, bandwidth / cards, cards))
    return tuple(made)


def _wired(
    fabric: Fabric, name: str, tier: Tier, below: Pod | None, card: BytesPerSecond, cards: int
) -> Pod:
    """A tier on the one below it, or on the network cards of nodes.

    With rails a leaf has one port for each node, and as many leaves are a pod as a node has cards;
    else it has one for each card. A spine has one for each leaf of its pod.
    """
    leaves, ports = cards if fabric.rails else 1, fabric.switch_ports
    ratio = tier.oversubscription * (tier.speed or card) / card  # ports down for each one up
    if below:
        under = below.tier
        ratio = max(1.0, ratio / (under.oversubscription * (under.speed or card) / card))
    unit, each = (below.nodes, leaves) if below else (1, cards // leaves)
    nodes = tier.nodes
    if nodes is None:
        assert ports is not None
        nodes = _most_down(ports, ratio) // each * unit
        if nodes < 1:
            raise OptionError(
                f"fabric.{name}: a switch of {ports} ports has too few for {cards} network cards of"
                f" a node at an oversubscription of {tier.oversubscription:g}; give more"
                " switch_ports, or rails"
            )
    if below and (nodes % unit or nodes <= unit):
        raise OptionError(
            f"fabric.{name}: pods of {nodes:,} nodes are no multiple of those of the leaf, {unit:,}"
        )
    down = nodes // unit * each
    uplinks = round(down / ratio)
    if ports is not None and (uplinks < 1 or down + uplinks > ports):
        raise OptionError(
            f"fabric.{name}: {nodes:,} nodes at an oversubscription of {tier.oversubscription:g}"
            f" need {down} ports of a switch down and {uplinks} up; it has {ports}, and at least"
            " one must lead up"
        )
    return Pod(
        tier=tier,
        fabric=fabric,
        cards=cards,
        nodes=nodes,
        ours=max(1, round(nodes * fabric.share)),
        switches=below.uplinks * leaves if below else leaves,
        down=down,
        uplinks=max(1, uplinks),
        bandwidth=nodes / tier.oversubscription * (1 - tier.background),
    )


def _most_down(ports: int, ratio: float) -> int:
    """Of the ports of a switch, those that lead down where `ratio` of them have one up."""
    down = int(ports * ratio / (1 + ratio) * (1 + 1e-12))
    while down and down + round(down / ratio) > ports:
        down -= 1
    return down


# --- hashed paths ---------------------------------------------------------------------------------

_EXACT = 512
"""Flows up to which the loads of uplinks are counted exactly; beyond they are taken as independent,
which differs by less than 3 % there (tests/co2sim/hardware/test_fabric.py)."""


@lru_cache(1024)
def busiest(flows: int, uplinks: int, switches: int) -> tuple[int, tuple[float, ...]]:
    """A load, and the probabilities that no uplink has more than it, than one more, and so on.

    That any has fewer at most, or more than the last, has a probability below 1e-9. Each of the
    `switches` hashes its flows onto its uplinks, apart from the others. Up to 512 flows this is
    exact: loads of uplinks are independent Poisson numbers of which the sum is known.
    """
    mean = flows / uplinks
    least = max(math.ceil(mean) - 1, 0)
    far = max(0, least - 20 * math.isqrt(least))  # fewer have no weight
    terms = [_poisson(load, mean) for load in range(far if flows > _EXACT else 0, least)]
    below = sum(terms)
    chances: list[float] = []
    for load in range(least, flows + 1):
        terms.append(_poisson(load, mean))
        below = min(1.0, below + terms[-1])
        if flows > _EXACT:
            chance = below**uplinks
        else:
            chance = _coefficient(np.array(terms), uplinks, flows) / _poisson(flows, flows)
        chances.append(min(1.0, chance) ** switches)
        if chances[-1] > 1 - _REST:
            break
    return least, tuple(chances)


_REST = 1e-9


def _poisson(count: int, mean: float) -> float:
    """The probability of a Poisson number."""
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


def _coefficient(polynomial: NDArray[np.float64], power: int, degree: int) -> float:
    """That of x^degree of a polynomial to a power."""
    result, square = np.ones(1), polynomial
    while power:
        if power & 1:
            result = np.convolve(result, square)[: degree + 1]
        power >>= 1
        if power:
            square = np.convolve(square, square)[: degree + 1]
    return float(result[degree]) if len(result) > degree else 0.0


def imbalance(flows: int, uplinks: int, switches: int, least: float = 0.0) -> float:
    """Flows on the busiest uplink of all over those that each had if they spread, in the mean.

    One flow has a single one of the uplinks: the imbalance is their number. What is below `least`
    counts as much, as where the flows are no faster than that at their ends.
    """
    load, chances = busiest(flows, uplinks, switches)
    mean = max(load * uplinks / flows, least)
    for more, chance in enumerate(chances, load + 1):
        step = max(more * uplinks / flows, least) - max((more - 1) * uplinks / flows, least)
        mean += (1 - chance) * step
    return mean


# --- what is bought -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """Switches by tier, from the nodes on, and links: `links` to nodes, and between switches."""

    tiers: tuple[int, ...] = ()
    links: int = 0

    @property
    def switches(self) -> int:
        """All of them."""
        return sum(self.tiers)


def fat_tree(ends: int, ports: int) -> Network:
    """The smallest tree of switches with `ports` ports that joins `ends` ports without blocking.

    One switch, or two or three tiers, in which half of the ports of a switch lead down (Al-Fares,
    Loukissas and Vahdat, SIGCOMM 2008). Raises OptionError where three do not suffice.
    """
    if ends <= ports:
        return Network((1,), ends)
    half = ports // 2
    leaves = math.ceil(ends / half)
    if leaves <= ports:
        return Network((leaves, math.ceil(leaves * half / ports)), ends + leaves * half)
    if leaves > half * ports:
        most = half * half * ports
        raise OptionError(
            f"{ends:,} ports of nodes; three tiers of switches with {ports} ports join at most"
            f" {most:,}"
        )
    return Network((leaves, leaves, math.ceil(leaves * half / ports)), ends + 2 * leaves * half)


def network(
    fabric: Fabric | None, nodes: int, cards: int, speed: BytesPerSecond, ports: int
) -> Network:
    """The switches and links that join `nodes` nodes with `cards` cards of `speed` each.

    Without tiers it is a tree that blocks nothing; with rails of which a switch joins all nodes it
    has nothing above them, as data for other cards cross the node. `ports` are those of a switch
    unless the fabric says it. Raises OptionError where its tiers do not join them all.
    """
    ports = (fabric and fabric.switch_ports) or ports
    tiers = pods(fabric, speed * cards, cards) if fabric else ()
    if not tiers or nodes <= tiers[0].nodes:
        if fabric and fabric.rails and nodes <= ports:
            return Network((math.ceil(cards / (ports // nodes)),), nodes * cards)
        return fat_tree(nodes * cards, ports)
    counts: list[int] = []
    links, most = nodes * cards, 0
    for pod in tiers:
        if nodes <= pod.nodes:
            break
        counts.append(math.ceil(nodes / pod.nodes) * pod.switches)
        links += counts[-1] * pod.uplinks
        most = ports // (1 if most else pod.switches) * pod.nodes
    top = tiers[len(counts) - 1]
    if nodes > most:
        raise OptionError(
            f"fabric: {nodes:,} nodes are more than the {most:,} that switches with {ports} ports"
            f" join above pods of {top.nodes:,}; give another tier, larger pods or switch_ports"
        )
    return Network((*counts, math.ceil(counts[-1] * top.uplinks / ports)), links)
