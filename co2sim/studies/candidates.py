"""What could be trained on what: clusters, GPUs, strategies, micro-batches and recomputation."""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, date, datetime
from functools import cached_property
from itertools import product
from typing import Annotated, Any, Literal, TypeAlias

from co2sim.common.convert import Reader, amount, declared, money, option, seconds, share, wholes
from co2sim.common.errors import Co2simError, OptionError, UnitError
from co2sim.common.units import parse
from co2sim.common.validation import whole
from co2sim.hardware.cluster import Cluster
from co2sim.models.operators import Model
from co2sim.prediction.bounds import Shared, StepBound
from co2sim.prediction.choose import RECOMPUTES, divided, fits, samples_of
from co2sim.prediction.job import Job, Stage, fullest, of_one_sample
from co2sim.prediction.question import AUTO, OPEN_BATCH, Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, ONE_TRAINING, Goal, scale_of_case
from co2sim.prediction.totals import DAY, Totals, tokens_of
from co2sim.prediction.whole import PUBLISHED, published_project
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.pipeline import PipelineSchedule
from co2sim.simulation.noise import QUIET
from co2sim.strategies import LocalSteps, Strategy, options_of, says, with_options
from co2sim.strategies import parse as parse_strategy
from co2sim.strategies.co2 import has_auto_options
from co2sim.strategies.step import title
from co2sim.studies import grid
from co2sim.training.framework import Recompute
from co2sim.training.optimizer import Optimizer
from co2sim.training.stack import UNNAMED, Stack

OVER_SITES = ("diloco:tau=100,worker=site", "diloco:tau=100,worker=site,dtype=bf16")
"""Tried besides where a cluster has several sites."""

STRATEGIES = (
    *("ddp", "zero1", "zero1:shard=node", "zero2", "zeropp"),
    *("fsdp", "fsdp:reduce=bf16", "fsdp:shard=node", "fsdp:shard=node,reduce=bf16"),
    "fsdp:reshard_after_forward=false",
    *("local_sgd:tau=12,worker=node", "local_sgd:tau=12,worker=node,inner=fsdp"),
    *(
        "co2:tau=2,delay=1,fragments=2,worker=node",
        "co2:tau=2,delay=1,fragments=2,worker=node,inner=fsdp",
    ),
    *("co2:tau=12,delay=1,fragments=12,worker=node", "diloco:tau=12,worker=node"),
)
"""Tried where none are given: those that share a step, and local updates between nodes.

Local updates have the τ and the delay whose steps were measured (`step_factors`).
"""

_MAX = 200_000
"""Candidates of one plan: a minute before the first is simulated."""
_MANY = 16_000
"""Candidates up to which every number of nodes is tried, where none is named."""


MAX_STAGES = 32
"""Of a pipeline where none are given: published ones have 2 to 35, most of them 4 to 16."""
_MOST_EXPERTS = 64
_MOST_CHUNKS = 8
_MOST = 1024
_COUNTS = ("tp", "cp", "ep", "etp", "pp", "interleave")


_Counts: TypeAlias = Annotated[tuple[int, ...] | None, Reader(wholes, "N,N")]


def _schedules(name: str, text: str) -> tuple[str, ...]:
    """Names of schedules between commas, as `Mesh` reads each. Raises OptionError."""
    parts = (declared(Mesh, {name: part.strip()}) for part in text.split(","))
    return tuple(part[name] for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What is tried of each kind of parallelism; None: what the module says, and 1.

    Raises OptionError for numbers below 1, and for one that is given twice.
    """

    tp: _Counts = option(
        None,
        "GPUs of a node that share every layer (tensor parallelism), such as 4 or 1,2,4; default:"
        " powers of two up to a node.",
        "plan",
    )
    sequence_parallel: bool | None = option(
        None,
        "Whether GPUs that share layers divide the sequence, too; default: they do.",
        "plan",
    )
    cp: _Counts = option(
        None,
        "GPUs that divide every sequence (context parallelism); default: 1, and powers of two that"
        " leave each 4,096 tokens or more (32,768 with torchtitan).",
        "plan",
    )
    ep: _Counts = option(
        None,
        "GPUs that divide the experts of a layer (expert parallelism); default: powers of two that"
        " do, up to 64.",
        "plan",
    )
    etp: _Counts = option(
        None,
        "GPUs that share every expert, where ep divides them: 1, or as many as tp; default: 1.",
        "plan",
    )
    pp: _Counts = option(
        None,
        "Stages of a pipeline; default, with ddp and zero1: powers of two and what divides"
        " the layers, up to 32.",
        "plan",
    )
    interleave: _Counts = option(
        None,
        "Chunks of layers of each stage of a pipeline; default: 1, and the fewest and the most of"
        " up to 8 that divide the layers.",
        "plan",
    )
    schedule: Annotated[tuple[PipelineSchedule, ...] | None, Reader(_schedules, "<str>")] = option(
        None,
        "Orders of passes in a pipeline, as in `run`, or several: 1f1b,zbv; default: those that the"
        " stack says it has.",
        "plan",
    )

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        for name in _COUNTS:
            counts = getattr(self, name)
            if counts is None:
                continue
            for count in counts:
                whole(name, count, 1, _MOST)
            if not counts or len(set(counts)) < len(counts):
                raise OptionError(
                    f"{name} is {', '.join(map(str, counts)) or 'empty'}; give each number once"
                )

    def within(self, case: Question) -> "Axes":
        """With what a case says in the place of what is open: numbers other than 1."""
        said: dict[str, Any] = {
            name: (getattr(case, name),) for name in _COUNTS if getattr(case, name) > 1
        }
        if case.sequence_parallel:
            said["sequence_parallel"] = True
        if case.schedule != "1f1b":
            said["schedule"] = (case.schedule,)
        return replace(self, **said)

    @property
    def _open(self) -> bool:
        """Whether anything is: what a user says and cannot be is named, and not passed over."""
        return any(getattr(self, name) is None for name in ("tp", "cp", "ep", "pp"))

    def meshes(
        self, strategy: Strategy, cluster: Cluster, model: Model, gpus: int, stack: Stack
    ) -> Iterator[Mesh]:
        """All that fill a number of GPUs, the plain one first."""
        divides, stages = says(strategy, "divides_layers"), says(strategy, "has_stages")
        layers = len(model.blocks) - 2
        spreads = self.sequence_parallel
        spreads = model.divisible != "tp" if spreads is None else spreads
        tps = self.tp or (_powers_up_to(min(gpus, cluster.gpus_per_node)) if divides else (1,))
        long = divides and model.unit == "token"
        cps = self.cp or (_powers_up_to(model.tokens // stack.context_tokens) if long else (1,))
        mixes = divides and model.active_parameters < model.parameters  # it has experts
        eps = self.ep or (_powers_up_to(_MOST_EXPERTS) if mixes else (1,))
        pps = self.pp or (tuple(_stages(layers)) if stages and _lines_up(model) else (1,))
        for pp, tp, cp, ep, etp in product(pps, tps, cps, eps, self.etp or (1,)):
            shares = {1, tp if ep > 1 else 1}
            lines_up = not gpus % (tp * cp * pp) and not gpus // pp % (ep * etp)
            if self._open and not (lines_up and etp in shares):
                continue
            chunks = self.interleave or _chunks(layers, pp)
            chunks = (1,) if pp == 1 and len(pps) > 1 else chunks
            for count in chunks:
                mesh = Mesh(
                    tp=tp,
                    sequence_parallel=spreads
                    and (tp > 1 or bool(self.tp and self.sequence_parallel)),
                    cp=cp,
                    ep=ep,
                    etp=etp,
                    pp=pp,
                    interleave=count,
                )
                yield from self._ordered(mesh, strategy.name, stack, several=len(pps) > 1)

    def _ordered(self, mesh: Mesh, strategy: str, stack: Stack, *, several: bool) -> Iterator[Mesh]:
        """The mesh with every schedule; `several` numbers of stages are tried."""
        kinds = self.schedule or stack.schedules_of(strategy, mesh)
        if mesh.pp == 1 and (several or not self.schedule):
            kinds = ("1f1b",)
        others = self.pp is None or (self.interleave is None and mesh.interleave > 1)
        for kind in kinds:
            made = replace(mesh, schedule=kind)
            if not (made.problem and others):
                yield made


OPEN = Axes()
"""All that is usual."""


def _powers_up_to(most: int) -> tuple[int, ...]:
    """Powers of two from 1 on."""
    return tuple(2**k for k in range(max(1, most).bit_length()))


def _lines_up(model: Model) -> bool:
    """Whether stages can have parts of it: its layers have inputs."""
    layers = model.blocks[1:-1]
    return bool(layers) and all(block.boundary for block in layers)


def _even(layers: int, parts: int) -> bool:
    """Whether parts have as many layers each, maybe with embedding and head as one each."""
    return layers % parts == 0 or (layers + 2) % parts == 0


def _stages(layers: int) -> Iterator[int]:
    """Powers of two, and what divides the layers."""
    for stages in range(1, min(layers, MAX_STAGES) + 1):
        if stages & (stages - 1) == 0 or _even(layers, stages):
            yield stages


def _chunks(layers: int, pp: int) -> tuple[int, ...]:
    """One, and the fewest and the most of a few that divide the layers."""
    if pp == 1:
        return (1,)
    fitting = [n for n in range(2, _MOST_CHUNKS + 1) if n * pp <= layers and _even(layers, n * pp)]
    return (1, *dict.fromkeys((*fitting[:1], *fitting[-1:])))


def _parts(_name: str, text: str) -> tuple[str, ...]:
    """Texts between commas."""
    return tuple(part.strip() for part in text.split(","))


@dataclass(frozen=True)
class Space:
    """What is tried: all combinations that fit in memory.

    `job` gives model, global batch and precision; its cluster, strategy, GPUs, micro-batch and
    recomputation are replaced. `gpus` is as in `grid.gpu_counts`; None: `grid.all_counts`.
    `micro_batches` None stands for all powers of two. `axes` says how GPUs may divide the model;
    what the job says holds. A GPU's memory may be used but for the share `headroom`. Software
    `stacks` are tried, too; none: that of the job.
    """

    job: Question
    clusters: tuple[str | Cluster, ...]
    strategies: tuple[str | Strategy, ...] = STRATEGIES
    gpus: Any = None
    micro_batches: Annotated[tuple[int, ...] | None, Reader(wholes, "<str>")] = option(
        None,
        "Samples per GPU and micro-step, such as 1,2,4; default: powers of two.",
        "plan",
        "--micro-batch",
    )
    recomputes: Annotated[tuple[Recompute, ...], Reader(_parts, "<str>")] = option(
        RECOMPUTES,
        "Activations to recompute, as in `run`, or several: none,full/2,norms.",
        "plan",
        "--recompute",
    )
    axes: Axes = OPEN
    headroom: Annotated[float, Reader(share, "<str>")] = option(
        0.1, "Memory to leave free. Some published runs needed twice what is predicted.", "plan"
    )
    stacks: tuple[str | Stack, ...] = ()

    @property
    def by_stack(self) -> tuple["Space", ...]:
        """A space for each stack."""
        if not self.stacks:
            return (self,)
        jobs = (replace(self.job, stack=stack) for stack in self.stacks)
        return tuple(replace(self, job=job, stacks=()) for job in jobs)

    @cached_property
    def global_batch(self) -> int:
        """Samples of a step: given, or those of a published training (`prediction.choose`)."""
        return self._batch[0]

    def batch_for(self, groups: int) -> int:
        """Samples of a step of these groups of GPUs that train on the same ones.

        A batch in tokens is one that they divide, near by. Raises OptionError where none is.
        """
        batch = self.global_batch
        if batch % groups and not isinstance(self.job.global_batch, int):
            return divided(batch, groups)
        if batch % groups:
            raise OptionError(
                f"they do not divide the global batch of {batch:,} samples; --global-batch"
                f" {max(1, round(batch / groups)) * groups} is near"
            )
        return batch

    @property
    def batch_source(self) -> str:
        """Where the global batch comes from; empty if it was given."""
        return self._batch[1]

    @cached_property
    def _batch(self) -> tuple[int, str]:
        model = replace(self.job, cluster=self.clusters[0]).load()[1].value
        adapters = self.job.lora is not None
        return samples_of(self.job.global_batch or AUTO, model, adapters=adapters)


@dataclass(eq=False)
class Setup:
    """Cluster, GPUs, strategy and what these divide: its candidates share all but their passes.

    `case`, as the job `sized`, has one micro-step of one sample, and what stands in its files in
    place of the names that the `job` has. `between`: its number of GPUs is neither given nor a
    doubled one. `samples` of the `global_batch` are of GPUs that train
    together; these take them in any of `micro_batches`, with any of `recomputes`.
    """

    case: Question
    sized: Job
    job: Question
    global_batch: int
    samples: int
    micro_batches: tuple[int, ...]
    recomputes: tuple[Recompute, ...]
    shared: Shared
    between: bool = False

    def of(self, micro_batch: int, recompute: Recompute) -> Question:
        """A candidate."""
        return replace(
            self.case,
            cluster=self.job.cluster,
            model=self.job.model,
            stack=self.job.stack,
            micro_batch=micro_batch,
            recompute=recompute,
            accumulation=None,
            global_batch=self.global_batch,
        )

    @cached_property
    def open(self) -> bool:
        """Whether options of its strategy are still to be chosen, with which its memory is."""
        return has_auto_options(self.case.parsed)

    @cached_property
    def bound(self) -> StepBound:
        """Of its steps."""
        return StepBound(self.sized, self.shared)

    def fits(self, micro_batch: int, recompute: Recompute, headroom: float) -> bool:
        """Whether a candidate leaves the headroom, as far as that is known."""
        if self.open:
            return True
        size = micro_batch, self.samples // micro_batch, recompute
        room = self.sized.cluster.gpu.memory
        if not fits(self.bound.memory(*size), room, headroom):
            return False
        return fits(fullest(self._stages, *size).memory()["total"], room, headroom)

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        return of_one_sample(self.sized, self.shared.stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What is to be looked at, and what is impossible, and why. `cases` are all of the setups.

    `doubled`: of numbers of nodes only doubled ones, as all are too many.
    """

    setups: tuple[Setup, ...]
    impossible: dict[str, str]
    doubled: bool = False

    def cases(self, headroom: float) -> Iterator[Question]:
        """Those that leave the headroom."""
        for setup in self.setups:
            for recompute in setup.recomputes:
                for micro in setup.micro_batches:
                    if setup.fits(micro, recompute, headroom):
                        yield setup.of(micro, recompute)


def candidates(space: Space) -> Candidates:
    """All that may be in a space.

    Raises OptionError for a space without any case that can be, or with too many.
    """
    setups: list[Setup] = []
    impossible: dict[str, str] = {}
    for part in space.by_stack:
        check(part)
    named: list[tuple[_Setups, int]] = []
    between: list[tuple[_Setups, int]] = []
    for part, cluster in product(space.by_stack, space.clusters):
        of_cluster, case = _Setups(part, cluster), replace(part.job, cluster=cluster)
        sizes = grid.gpu_counts(case, part.gpus)
        named += [(of_cluster, gpus) for gpus in sizes]
        every = grid.all_counts(case) if part.gpus is None else ()
        between += [(of_cluster, gpus) for gpus in every if gpus not in sizes]
    count = 0
    for of_cluster, gpus in named:
        for setup in of_cluster.of_size(gpus, impossible):
            setups.append(setup)
            count += len(setup.micro_batches) * len(setup.recomputes)
            if count > _MAX:
                raise OptionError(
                    f"these are more than {_MAX:,} candidates; give fewer GPU counts,"
                    " strategies, micro-batches, or numbers of --tp, --cp, --ep and --pp"
                )
    few = count * (1 + len(between) / len(named)) <= _MANY if named else False
    for of_cluster, gpus in between if few else ():
        for setup in of_cluster.of_size(gpus, {}):
            setup.between = True
            setups.append(setup)
    if not setups:
        name, reason = next(iter(impossible.items()), ("", "no candidate is left"))
        raise OptionError(f"{name}: {reason}" if name else reason)
    doubled = bool(between) and not few
    return Candidates(setups=tuple(setups), impossible=impossible, doubled=doubled)


def check(space: Space) -> None:
    """Refuse what is given twice, or is out of range; load every input once."""
    if not 0 <= space.headroom < 1:
        raise OptionError(f"headroom is {space.headroom:g}; it must be 0 or more, and below 1")
    if not space.recomputes:
        raise OptionError("no recomputation is given, such as none or full")
    recomputes = [replace(space.job, recompute=r).recompute for r in space.recomputes]
    for what, values in (
        ("micro-batch", space.micro_batches or ()),
        ("recomputation", recomputes),
    ):
        if len(set(values)) < len(values):
            raise OptionError(f"a {what} is given twice: {', '.join(map(str, values))}")
    for micro in space.micro_batches or ():
        whole("micro_batch", micro, 1)
    grid.over_sizes(space.job, space.clusters, space.strategies, space.gpus)


class _Setups:
    """Those of one cluster."""

    def __init__(self, space: Space, cluster: str | Cluster) -> None:
        self._space = space
        self._named = replace(space.job, cluster=cluster)
        self._job = replace(
            self._named.inlined(),
            **Mesh().mesh_values(),
            micro_batch=1,
            accumulation=1,
            global_batch=None,
            recompute="none",
        )
        entries = self._job.load()
        self._cluster, self._model = entries[0].value, entries[1].value
        self._shared = Shared(self._cluster)
        self._stack, used = self._job.load_stack().value, self._job.used_stack(self._cluster.gpu)
        self._chosen = used if space.strategies == STRATEGIES else UNNAMED
        self._axes = space.axes.within(space.job)

    def of_size(self, gpus: int, impossible: dict[str, str]) -> Iterator[Setup]:
        """Those of a number of GPUs; what is left out is noted where nothing else is in its place.

        That is where all ways to divide the model are.
        """
        strategies: Iterable[str | Strategy] = self._space.strategies
        if strategies == STRATEGIES:
            more = OVER_SITES if self._cluster.resized(gpus).sites > 1 else ()
            ours = (as_it_runs(strategy, self._chosen) for strategy in (*STRATEGIES, *more))
            by_title = {grid.strategy_title(strategy): strategy for strategy in ours if strategy}
            strategies = by_title.values()
        for strategy in strategies:
            case, left, some = replace(self._job, strategy=strategy, gpus=gpus), "", False
            name = f"{grid.strategy_title(strategy)} on {gpus:,} GPUs"
            for mesh in self._axes.meshes(
                case.parsed, self._cluster, self._model, gpus, self._stack
            ):
                try:
                    yield self._setup(mesh, replace(case, **mesh.mesh_values()))
                except Co2simError as error:
                    left = left or str(error)
                else:
                    some = True
            if not some:
                impossible.setdefault(name, left or "no tp x cp x pp, nor ep, divides them")

    def _setup(self, mesh: Mesh, case: Question) -> Setup:
        assert case.gpus is not None
        groups = -(-case.gpus // mesh.together)
        batch = self._space.batch_for(groups)
        samples = batch // groups
        powers = [2**power for power in range(samples.bit_length())]
        micros = [m for m in self._space.micro_batches or powers if samples % m == 0]
        micros = [micro for micro in micros if mesh.takes(samples // micro)]
        if not micros:
            raise OptionError(
                f"no micro-batch divides the {samples} samples that a GPU has of the global batch"
            )
        if isinstance(case.parsed, LocalSteps) and scale_of_case(case).workers == 1:
            raise OptionError("local updates need two workers")  # one averages with none
        strategy = case.parsed
        if lacking := self._chosen.lacks(strategy.name, options_of(strategy), mesh):
            raise OptionError(f"{self._chosen.name} has {lacking}")
        job = case.job()
        job.workload.share  # noqa: B018 - what cannot be divided so is no candidate
        recomputes = job.applying(self._space.recomputes)
        return Setup(
            case, job, self._named, batch, samples, tuple(micros), recomputes, self._shared
        )


def as_it_runs(strategy: str, stack: Stack) -> str | None:
    """A strategy with what a stack asks of options that the text leaves open; None: it has none."""
    made = parse_strategy(strategy)
    if not stack.lacks(made.name, options_of(made), Mesh()):
        return strategy
    usual = parse_strategy(made.name)
    for needs in stack.needs(made.name):
        open_ = (name for name in needs if getattr(made, name) == getattr(usual, name))
        tried = with_options(made, {name: needs[name][0] for name in open_})
        if not stack.lacks(tried.name, options_of(tried), Mesh()):
            return title(tried)
    return None


Want: TypeAlias = Literal["cheapest", "fastest", "least-energy"]


def _days(name: str, text: str) -> float:
    """Days of a time, or from today to a date."""
    try:
        last = date.fromisoformat(text.strip())
    except ValueError:
        try:
            return seconds(name, text) / DAY
        except OptionError as error:
            raise OptionError(f"{error}; or a date, such as 2027-03-01") from None
    days = (last - datetime.now(UTC).date()).days
    if days < 1:
        raise OptionError(f"{name} is {text}, and must be after today")
    return float(days)


def _watts(name: str, text: str) -> float:
    try:
        return parse(text, "W")
    except UnitError as error:
        raise OptionError(f"{name}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is wanted of a training of `tokens` (those that ddp would train), within limits.

    `budget` is in the currency of the clusters, `deadline` in days, `power` in W at the meter.
    """

    tokens: Annotated[float, Reader(amount)] = option(
        MISSING,
        "Tokens that ddp would train, such as 1e12 or 1T; local updates need more.",
        "plan",
    )
    want: Want = option(
        MISSING,
        "cheapest, fastest or least-energy; default: cheapest, or fastest where no cluster has a"
        " price, or with a budget and no deadline.",
        "plan",
    )
    deadline: Annotated[float | None, Reader(_days, "<str>")] = option(
        None, 'The longest that training may take: "30 days", or a date: 2027-03-01.', "plan"
    )
    budget: Annotated[float | None, Reader(money)] = option(
        None, "The most that it may cost, in the currency of the clusters' prices.", "plan"
    )
    power: Annotated[float | None, Reader(_watts, "<str>")] = option(
        None, 'The most power that it may draw at the meter: "500 kW".', "plan"
    )
    goal: Goal = NO_GOAL

    def __post_init__(self) -> None:
        """Refuse limits that nothing can meet."""
        tokens_of(self.tokens)
        for name in ("budget", "deadline", "power"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise OptionError(f"the {name} is {value:g}; it must be above 0")

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return (self.budget, self.deadline, self.power) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A candidate that was simulated, on its sized cluster."""

    case: Question
    cluster: Cluster
    result: Result
    totals: Totals

    @property
    def spent(self) -> float:
        """Money; GPU-hours where nothing has a price."""
        return self.totals.gpu_hours if self.totals.cost is None else self.totals.cost

    def score(self, want: Want) -> float:
        """What is to be least: money (or GPU-hours), days, or kWh."""
        if want == "fastest":
            return self.totals.days
        if want == "cheapest":
            return self.spent
        if self.totals.energy_kwh is None:
            raise OptionError(f"the power of {self.cluster.name!r} is not known")
        return self.totals.energy_kwh

    def ends(self, want: Want) -> tuple[float, float] | None:
        """The 90 % interval of the score; None where there is none."""
        totals = self.totals
        pairs = {
            "fastest": (totals.days_low, totals.days_high),
            "cheapest": (totals.cost_low, totals.cost_high),
            "least-energy": (totals.energy_kwh_low, totals.energy_kwh_high),
        }
        low, high = pairs[want]
        if low is not None and high is not None:
            return low, high
        if totals.days_low is None or totals.days_high is None:
            return None
        ratio = self.score(want) / totals.days
        return totals.days_low * ratio, totals.days_high * ratio

    def within(self, wanted: Objective, *, surely: bool = False) -> bool:
        """Whether it is within all limits; what is not known is not.

        `surely`: at the bad end of its intervals, too.
        """
        totals = self.totals
        limits = (
            (wanted.deadline, totals.days_high if surely else totals.days),
            (wanted.budget, totals.cost_high if surely else totals.cost),
            (wanted.power, totals.power_w),
        )
        return all(most is None or (value is not None and value <= most) for most, value in limits)


_NAMED = {"cluster", "model", "strategy", "overrides", "noise"}


def command_of(case: Question, command: str = "run") -> str:
    """`co2sim COMMAND` with the options of the case, for a shell.

    Raises OptionError for a cluster or a model that is an object: a command line names files.
    """
    for thing in (case.cluster, case.model, case.stack, case.optimizer):
        if isinstance(thing, Cluster | Model | Stack | Optimizer):
            raise OptionError(f"{thing.name} is an object; a command line takes names and files")
    return shlex.join(["co2sim", command, *_options(case)])


def with_tokens(command: str, tokens: float | None, goal: Goal = NO_GOAL) -> str:
    """The command with the tokens to train, the user's own step factors, and that of a project."""
    more = (
        []
        if tokens is None
        else ["--tokens", f"{tokens:g}" if float(f"{tokens:g}") == tokens else f"{tokens!r}"]
    )
    for name, factor in goal.factors.items():
        more += ["--steps-factor", f"{name}={factor!r}"]
    if goal.project != ONE_TRAINING:
        published = goal.project == published_project()
        more += ["--project", PUBLISHED if published else f"{goal.project.factor!r}"]
    return f"{command} {shlex.join(more)}" if more else command


def _options(case: Question) -> Iterator[str]:
    strategy = case.strategy if isinstance(case.strategy, str) else title(case.strategy)
    yield from ("-c", str(case.cluster), "-m", str(case.model), "-s", strategy)
    if case.global_batch is None and case.accumulation is None:
        case = replace(case, accumulation=1)
    for field in fields(Question):
        value = getattr(case, field.name)
        if field.name in _NAMED or value in (None, OPEN_BATCH.get(field.name, field.default)):
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        else:
            yield from (f"--{name}", str(value))
    noise = case.noise
    for name in ("seed", "jitter", "straggle"):
        if getattr(noise, name) != getattr(QUIET, name):
            yield from (f"--{name}", str(getattr(noise, name)))
    for node, speed in noise.node_speed.items():
        yield from ("--node-speed", f"{node}={speed}")
    for path, text in case.overrides.items():
        yield from ("--set", f"{path}={text}")
