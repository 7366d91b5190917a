"""How cheap a network may be: network cards and oversubscription, priced by parts, and simulated.

Every network is bought with its switches, links and cards (`prediction.ownership`), and every
strategy trains on it. Of a strategy the network is chosen that costs least of those which lose at
most a part of its speed to the loss: tokens/s over the steps that one of ddp is worth.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Annotated

from co2sim.catalog.facts import Rate
from co2sim.common import convert
from co2sim.common.convert import Reader, option
from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import BytesPerSecond, Watts
from co2sim.common.validation import between, whole
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.fabric import MOST_CARDS, MOST_SLOWER, Fabric
from co2sim.prediction import power
from co2sim.prediction.ownership import (
    HOUR,
    SETS,
    Costs,
    Part,
    as_sold,
    costs_of,
    machine,
    network_of,
    network_parts,
    node_of,
    numbers,
    ownership,
    split,
)
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, scale_of, step_factor, to_loss
from co2sim.prediction.totals import DAY, tokens_of, totals_of
from co2sim.studies.grid import strategy_title
from co2sim.studies.run_all import Failure, Outcome, run_all

OFF = 0.18
"""Mean error of published speeds over networks in which flows meet: docs/validation.md."""
BILLION = 1e9
"""Tokens that are trained where nothing else is said."""
_VARIED = ("fabric.leaf.oversubscription", "fabric.spine.oversubscription")
_LEAFLESS = ("fabric.placement", "fabric.share")
"""Of a cluster with leaves only, besides what is said of the leaves."""
_SAME = 1e-9
"""Of a speed: what is no difference."""
MOST_PORTS = 1024
"""Of a switch: as `hardware.fabric.Ports`."""
_GIGABIT: BytesPerSecond = 1e9 / 8
_WHOLE = 999.5
"""Gbit/s from which a speed has three digits without a fraction."""


def _gigabits(card: BytesPerSecond) -> str:
    """The speed of a card, such as `400G` or `1,067G`: three digits, and no power of ten."""
    speed = card / _GIGABIT
    return f"{speed:,.0f}G" if speed >= _WHOLE else f"{speed:.3g}G"


def _ratios(name: str, text: str) -> tuple[float, ...]:
    """Numbers between commas, in the order that they are written in: 3 or 3:1."""
    parts = (part.strip().removesuffix(":1") for part in text.split(","))
    return tuple(convert.number(name, part) for part in parts)


def _counts(name: str, text: str) -> tuple[int, ...]:
    return tuple(convert.whole(name, part.strip()) for part in text.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Which networks, and what is made of them. Raises OptionError for what is out of range."""

    oversubscription: Annotated[tuple[float, ...], Reader(_ratios, "N,N")] = option(
        (1.0, 2.0, 4.0, 8.0),
        "Bandwidth of the nodes of a leaf over that of its uplinks: 1,2,4,8.",
        "fabric",
    )
    nics: Annotated[tuple[int, ...] | None, Reader(_counts, "N,N")] = option(
        None,
        "Network cards of a node, each as fast as those of the cluster; default: as many as it"
        " has, halved down to 1.",
        "fabric",
    )
    rails: bool | None = option(
        None,
        "Each network card of a node has its own leaf; default: as the cluster says.",
        "fabric",
    )
    ports: int | None = option(
        None, "Ports of a switch; default: as the cluster says, or own.switch_ports.", "fabric"
    )
    loses: Annotated[float, Reader(convert.share, "<str>")] = option(
        0.05, "What a strategy may lose of its speed on the best network: 5%.", "fabric"
    )
    years: float = option(3.0, "How long the cluster is kept.", "fabric")
    utilization: Annotated[float, Reader(convert.share, "<str>")] = option(
        0.7, "The part of all hours in which GPUs are used: 70%.", "fabric"
    )

    def __post_init__(self) -> None:
        """Refuse what is out of range, or there twice."""
        for ratio in self.oversubscription:
            between("--oversubscription", ratio, 0.1, MOST_SLOWER)
        for cards in self.nics or ():
            whole("--nics", cards, 1, 1024)
        for flag, values in (("--oversubscription", self.oversubscription), ("--nics", self.nics)):
            if values is not None and len(set(values)) < len(values):
                raise OptionError(f"{flag} has a value twice")
        if self.ports is not None:
            whole("--ports", self.ports, 4, MOST_PORTS)
        between("--years", self.years, 0.25, 20)
        _percent("--loses", self.loses, 0, 0.99)
        _percent("--utilization", self.utilization, 0.001, 1)


def _percent(flag: str, share: float, least: float, most: float) -> None:
    if not least <= share <= most:
        example = "; write 5% or 0.05" if share > 1 else ""
        raise OptionError(
            f"{flag} is {100 * share:g}%; it must be {100 * least:g}% to {100 * most:g}%{example}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network that can be bought; `usd` and `watts` are those of a GPU, cards of nodes included.

    `oversubscription` is None where no leaf needs uplinks: one switch joins all nodes, or all cards
    of one rail. `leaf_nodes` are those of a leaf, all of them there. `share` is what the
    network is of all that is bought. `changes` of the cluster make it.
    """

    nics: int
    card: BytesPerSecond
    oversubscription: float | None
    leaf_nodes: int
    tiers: tuple[int, ...]
    links: int
    parts: Mapping[str, Part]
    gpus: int
    share: float
    changes: Mapping[str, str]

    @property
    def usd(self) -> float:
        """USD a GPU."""
        return sum(part.usd for part in self.parts.values()) / self.gpus

    @property
    def watts(self) -> Watts:
        """What it draws for a GPU."""
        return sum(part.watts for part in self.parts.values()) / self.gpus

    @property
    def name(self) -> str:
        """Such as `4 x 400G, 2:1`: cards of a node, and the oversubscription of leaves."""
        cards = f"{self.nics} x {_gigabits(self.card)}"
        if self.oversubscription is None:
            return f"{cards}, {'one switch' if sum(self.tiers) == 1 else 'no spines'}"
        return f"{cards}, {self.oversubscription:g}:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A strategy on a network.

    `pace` are tokens/s over the steps that one of ddp is worth (`factor`; None: not known, taken as
    1), and `lost` is what it is less than on the best network. `days` and `usd`, what owning costs
    in that time, are those of the tokens to be trained, None without a factor.
    """

    strategy: str
    network: Network
    case: Question
    result: Result
    factor: float | None
    pace: float
    lost: float
    days: float | None
    usd: float | None


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Networks with every strategy on each, of `planned` that can be wired; why others cannot.

    `cards` and `gpus_per_node` are those of the cluster. `refused` are strategies that run on no
    network, and why.
    """

    tried: Tried
    gpus: int
    gpus_per_node: int
    cards: int
    planned: int
    networks: Sequence[Network]
    unwired: Sequence[tuple[str, str]]
    trainings: Sequence[Training]
    tokens: float | None
    refused: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def strategies(self) -> list[str]:
        """In the order that they were named in."""
        return list(dict.fromkeys(trained.strategy for trained in self.trainings))

    def of(self, strategy: str) -> list[Training]:
        """A strategy on each network."""
        return [trained for trained in self.trainings if trained.strategy == strategy]

    def chosen(self, strategy: str) -> Training:
        """On the cheapest network that loses no more than it may, and on which it fits in memory.

        Of a strategy that fits on none, as if it did: no network is recommended for it.
        """
        here = _fitting(self.of(strategy))
        enough = [trained for trained in here if trained.lost <= self.tried.loses]
        return min(enough, key=lambda trained: (trained.network.usd, trained.lost))

    @property
    def cheapest(self) -> Training | None:
        """Of all, the training that costs least, if it fits in memory; None where none is known."""
        fitting = [trained for trained in self.trainings if trained.result.fits_in_memory]
        priced = [trained for trained in fitting if trained.usd is not None]
        return min(priced, key=lambda trained: trained.usd or 0.0, default=None)

    @property
    def full(self) -> Network:
        """With the most cards, and the least oversubscription."""
        return min(
            self.networks, key=lambda network: (-network.nics, network.oversubscription or 0.0)
        )

    @property
    def better(self) -> str:
        """The name of the network with more than `full` that cannot be wired; empty without one."""
        most = max(self.tried.nics or [self.cards])
        ends = f"{most} x ", f", {min(self.tried.oversubscription):g}:1"
        name = self.unwired[0][0] if self.unwired else ""
        return name if name.startswith(ends[0]) and name.endswith(ends[1]) else ""

    @property
    def near(self) -> int:
        """Trainings that would lose as much as they may if what they lose is off by `OFF`."""
        most = self.tried.loses
        return sum(abs(most - trained.lost) <= OFF * trained.lost for trained in self.trainings)


# --- which networks there are ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is to be simulated: `cases` by network, and in each by strategy."""

    questions: Sequence[Question]
    tried: Tried
    costs: Costs
    cluster: Cluster
    sold: Cluster
    networks: Sequence[Network]
    unwired: Sequence[tuple[str, str]]

    @cached_property
    def cases(self) -> list[Question]:
        """Every strategy on every network."""
        return [
            replace(case, overrides=_overrides(case, network.changes))
            for network, case in product(self.networks, self.questions)
        ]

    def simulate(self, jobs: int, *, progress: bool | None = None) -> list[Outcome]:
        """As `run_all`; where no strategy runs its error names the first one, and why."""
        try:
            return run_all(self.cases, jobs, progress=progress)
        except Co2simError as error:
            if not isinstance(first := error.__cause__, Co2simError):
                raise
            title = strategy_title(self.questions[0].strategy)
            raise type(first)(f"{title} runs on no network: {first}") from first

    def refused(self, outcomes: Mapping[int, Outcome]) -> dict[int, str]:
        """The columns of strategies that failed on every network on which they ran, and why."""
        width = len(self.questions)
        columns = [
            [outcome for index, outcome in outcomes.items() if index % width == n]
            for n in range(width)
        ]
        return {
            n: here[0].reason
            for n, here in enumerate(columns)
            if here and isinstance(here[0], Failure) and all(isinstance(o, Failure) for o in here)
        }

    def complete(self, outcomes: Mapping[int, Outcome]) -> list[int]:
        """The places of the networks on which every strategy that is not refused has a result."""
        width = len(self.questions)
        columns = set(range(width)) - self.refused(outcomes).keys()
        return [
            row
            for row in range(len(self.networks))
            if columns and all(isinstance(outcomes.get(row * width + n), Result) for n in columns)
        ]

    def answer(
        self, outcomes: Mapping[int, Outcome], tokens: float | None, goal: Goal = NO_GOAL
    ) -> Networks:
        """The answer by outcomes by the places of cases; networks that lack one are left out."""
        rows, refused = self.complete(outcomes), self.refused(outcomes)
        trainings = [
            self._training(row, column, outcomes, tokens, goal)
            for row in rows
            for column in range(len(self.questions))
            if column not in refused
        ]
        return Networks(
            tried=self.tried,
            gpus=self.networks[0].gpus,
            gpus_per_node=self.cluster.gpus_per_node,
            cards=self.cluster.cards,
            planned=len(self.networks),
            networks=[self.networks[row] for row in rows],
            unwired=self.unwired,
            trainings=_compared(trainings),
            tokens=tokens,
            refused={strategy_title(self.questions[n].strategy): why for n, why in refused.items()},
        )

    def _training(
        self,
        row: int,
        column: int,
        outcomes: Mapping[int, Outcome],
        tokens: float | None,
        goal: Goal,
    ) -> Training:
        position = row * len(self.questions) + column
        case, result = self.cases[position], outcomes[position]
        assert isinstance(result, Result)
        factor = step_factor(result.strategy, scale_of(result), goal)
        days = _days(case, result, tokens, goal)
        usd = None
        if days is not None:
            cluster = case.load()[0].value.resized(result.gpus)
            bought = machine(cluster, power.computing_share(result), self.sold)
            owned = ownership(self.costs, bought, self.tried.years, self.tried.utilization)
            usd = owned.per_used_hour * days * DAY / HOUR * result.gpus
        return Training(
            strategy=strategy_title(self.questions[column].strategy),
            network=self.networks[row],
            case=case,
            result=result,
            factor=factor.factor if factor else None,
            pace=result.tokens_per_s / (factor.factor if factor else 1.0),
            lost=0.0,
            days=days,
            usd=usd,
        )


def _days(case: Question, result: Result, tokens: float | None, goal: Goal) -> float | None:
    """Of the tokens, or of the steps of the goal; None where no step factor is known."""
    if tokens is None and goal.steps is not None:
        loss = to_loss(result, goal)
        return None if loss is None else loss.time_s / DAY * goal.project.factor
    trained = totals_of(case, result, BILLION if tokens is None else tokens, goal)
    return None if trained is None else trained.days


def _fitting(trainings: Sequence[Training]) -> Sequence[Training]:
    """Those that fit in memory; all where none does."""
    return [trained for trained in trainings if trained.result.fits_in_memory] or trainings


def _compared(trainings: Sequence[Training]) -> list[Training]:
    """With what each loses against the best network of its strategy, if any where it fits."""
    best: dict[str, float] = {}
    for strategy in {trained.strategy for trained in trainings}:
        here = _fitting([trained for trained in trainings if trained.strategy == strategy])
        best[strategy] = max(trained.pace for trained in here)
    lost = [1 - trained.pace / best[trained.strategy] for trained in trainings]
    return [
        replace(trained, lost=part if part > _SAME else 0.0)
        for trained, part in zip(trainings, lost, strict=True)
    ]


def _overrides(case: Question, changes: Mapping[str, str]) -> dict[str, str]:
    """Those of the case with those of a network: what leaves have goes where there are none."""
    kept = split(case.overrides)[1] | dict(changes)
    if "fabric.leaf.oversubscription" in changes:
        return kept
    return {name: text for name, text in kept.items() if not _of_leaves(name)}


def _of_leaves(name: str) -> bool:
    """Whether a cluster without leaves cannot have it."""
    return name in _LEAFLESS or name.startswith("fabric.leaf.")


def bench(cases: Sequence[Question], tried: Tried | None = None) -> Bench:
    """The networks to try under some strategies. Raises OptionError where none can be wired."""
    tried = tried or Tried()
    case = cases[0]
    _refuse_contradictions(case, tried)
    owning, others = split(case.overrides)
    sold = replace(case, overrides=as_sold(others)).load()[0].value
    _refuse_unknown(sold, owning)
    rent = Rate(name="rent", value="1 USD/h", date="", source="nothing is rented")
    costs = costs_of(numbers(sold, owning, rent))
    base = _base(replace(case, overrides=others), sold, tried.ports or costs.switch_ports)
    cluster = base.load()[0].value
    whole("--nics", max(tried.nics or (1,)), 1, MOST_CARDS * cluster.gpus_per_node)
    if case.gpus is not None:
        if case.gpus % cluster.gpus_per_node:
            raise OptionError(
                f"--gpus is {case.gpus}; whole nodes are bought: use a multiple of"
                f" {cluster.gpus_per_node}"
            )
        cluster = cluster.resized(case.gpus)
    if cluster.nodes_per_site == 1:
        least = 2 * cluster.sites * cluster.gpus_per_node
        raise OptionError(
            f"one node needs no network between nodes; give --gpus of {least} or more"
        )
    leaves = {name: text for name, text in others.items() if name not in base.overrides}
    shop = _Shop(base, cluster, tried, costs, sold, leaves)
    networks, unwired = shop.networks()
    if not networks:
        name, reason = unwired[-1]
        raise OptionError(
            f"no network of switches with {shop.ports} ports can be wired; give --ports (up to"
            f" {MOST_PORTS}), --rails, other --nics or fewer --gpus: {name}:"
            f" {reason.partition(';')[0]}"
        )
    return Bench(
        questions=cases,
        tried=tried,
        costs=costs,
        cluster=cluster,
        sold=sold,
        networks=networks,
        unwired=unwired,
    )


def _refuse_contradictions(case: Question, tried: Tried) -> None:
    """Raise OptionError for what is set of the cluster and varied, or stated twice."""
    for name in _VARIED:
        if name in case.overrides:
            raise OptionError(f"--set {name} is what --oversubscription varies; leave it out")
    for name, flag, value in (
        ("fabric.rails", "--rails", tried.rails),
        ("fabric.switch_ports", "--ports", tried.ports),
    ):
        if value is not None and name in case.overrides:
            raise OptionError(f"--set {name} is what {flag} says; leave one of them out")


def _refuse_unknown(cluster: Cluster, owning: Mapping[str, str]) -> None:
    """Raise OptionError that names all prices and powers that are lacking, and how to set them."""
    lacking = power.missing(cluster)
    sets = [power.sets(cluster, lacking)] if lacking else []
    names = list(lacking)
    if "node" not in owning and node_of(cluster) is None:
        names.append(f"{SETS}node, the price of a GPU with its part of a node,")
        sets.append(f"--set {SETS}node='36000 USD'")
    if names:
        are = "is" if len(names) == 1 else "are"
        raise OptionError(f"{' and '.join(names)} {are} not known; give {' '.join(sets)}, say")


def _base(case: Question, sold: Cluster, ports: int) -> Question:
    """The job on a cluster whose leaves are still open: what is set of them is left out.

    Unless the file of the cluster has leaves, or their nodes or spines are set: these stay. Raises
    OptionError for what no leaf can have.
    """
    others = dict(case.overrides)
    if (sold.fabric and sold.fabric.leaf) or "fabric.leaf.nodes" in others:
        return case
    if any(name.startswith("fabric.spine.") for name in others):
        leaf = {"fabric.leaf.oversubscription": "1", "fabric.switch_ports": str(ports)}
        return replace(case, overrides=leaf | others)
    if any(map(_of_leaves, others)):
        any_leaf = {"fabric.leaf.nodes": "1", "fabric.switch_ports": str(MOST_PORTS)}
        replace(case, overrides=others | any_leaf).load()
    return replace(case, overrides={n: t for n, t in others.items() if not _of_leaves(n)})


def networks(
    cases: Sequence[Question],
    tried: Tried | None = None,
    *,
    tokens: float | None = None,
    goal: Goal = NO_GOAL,
    jobs: int = 1,
    progress: bool | None = None,
) -> Networks:
    """What each strategy loses on cheaper networks, and which is the cheapest that suffices.

    `cases` are one job under several strategies. `tokens` are those that ddp would train. Raises
    Co2simError where no strategy runs, and `Interrupted` at control-C.
    """
    if tokens is not None:
        tokens_of(tokens)
    made = bench(cases, tried)
    outcomes = made.simulate(jobs, progress=progress)
    return made.answer(dict(enumerate(outcomes)), tokens, goal)


@dataclass(frozen=True)
class _Shop:
    """Where networks are bought: for the job of `case`, on `cluster`; `leaves` are set of them."""

    case: Question
    cluster: Cluster
    tried: Tried
    costs: Costs
    sold: Cluster
    leaves: Mapping[str, str]

    @property
    def ports(self) -> int:
        """Of a switch."""
        fabric = self.cluster.fabric
        return self.tried.ports or (fabric and fabric.switch_ports) or self.costs.switch_ports

    def networks(self) -> tuple[list[Network], list[tuple[str, str]]]:
        """Those that can be wired, and why others cannot; of equal ones the first."""
        cluster, tried = self.cluster, self.tried
        fabric = cluster.fabric or Fabric()
        card = cluster.inter.bandwidth / cluster.cards
        rails = fabric.rails if tried.rails is None else tried.rails
        cards = sorted(tried.nics or _halved(cluster.cards), reverse=True)
        made: dict[tuple[int, float | None], Network] = {}
        unwired: list[tuple[str, str]] = []
        for nics, ratio in product(cards, sorted(tried.oversubscription)):
            changes = {
                "fabric.switch_ports": str(self.ports),
                "fabric.nics": str(nics),
                "fabric.rails": str(rails).lower(),
                "inter.bandwidth": f"{nics * card / _GIGABIT:.12g} Gbit/s",
            }
            ends = cluster.nodes_per_site * (1 if rails else nics)
            one_switch = not fabric.leaf and ends <= self.ports
            try:
                wired = self._wired(changes, None if one_switch else ratio)
            except Co2simError as error:
                unwired.append((f"{nics} x {_gigabits(card)}, {ratio:g}:1", str(error)))
                continue
            made.setdefault((nics, wired.oversubscription), wired)
        return list(made.values()), unwired

    def _wired(self, changes: Mapping[str, str], ratio: float | None) -> Network:
        """A network with leaves of this oversubscription, and spines where leaves do not suffice.

        Raises Co2simError for what cannot be wired.
        """
        leaf: dict[str, str] = {}
        spine: dict[str, str] = {}
        if ratio is not None:
            leaf["fabric.leaf.oversubscription"] = f"{ratio:g}"
            spine["fabric.spine.oversubscription"] = f"{ratio:g}"
        has_spine = self.cluster.fabric is not None and self.cluster.fabric.spine is not None
        for more in [leaf | spine] if has_spine else [leaf, leaf | spine]:
            chosen = {**changes, **more}
            leaves = self.leaves if more else {}
            try:
                made = replace(self.case, overrides={**self.case.overrides, **leaves, **chosen})
                wired = made.load()[0].value.resized(self.cluster.layout.world_size)
                bought = machine(wired, sold=self.sold)
                counted = network_of(self.costs, bought)
                break
            except Co2simError:
                if more != leaf or has_spine or ratio is None:
                    raise
        inside = ratio is None or wired.nodes_per_site <= wired.pods[0].nodes
        parts = network_parts(self.costs, bought)
        paid = ownership(self.costs, bought, 1, 1).paid
        return Network(
            nics=wired.cards,
            card=wired.inter.bandwidth / wired.cards,
            oversubscription=None if inside else ratio,
            leaf_nodes=wired.nodes_per_site if inside else wired.pods[0].nodes,
            tiers=counted.tiers,
            links=counted.links,
            parts=parts,
            gpus=wired.layout.world_size,
            share=sum(part.usd for part in parts.values()) / paid,
            changes=chosen,
        )


def _halved(cards: int) -> Iterable[int]:
    """All, and half of them, down to one."""
    while cards:
        yield cards
        cards //= 2
