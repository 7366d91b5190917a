"""What could be trained on what: clusters, GPUs, strategies, micro-batches and recomputation."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.units import Seconds
from co2sim.common.validation import whole
from co2sim.hardware.cluster import Cluster
from co2sim.models.recompute import Recompute
from co2sim.models.stack import Stack
from co2sim.models.workload import Model
from co2sim.prediction.auto_delay import has_auto_options
from co2sim.prediction.batch import MemoryOf, first_step, fits, memory_of, samples_of
from co2sim.prediction.case import AUTO, OPEN, Case, LoadedCase
from co2sim.prediction.pipeline import StageMemory
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, scale_of_case
from co2sim.prediction.totals import Totals, tokens_of
from co2sim.simulation.collective_cost import traffic
from co2sim.simulation.noise import QUIET
from co2sim.simulation.token_bucket import shapers
from co2sim.strategies import LocalSteps, Strategy, parse
from co2sim.strategies.step import title
from co2sim.studies import grid

STRATEGIES = (
    *("ddp", "zero1", "zero2", "fsdp", "zeropp"),
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

RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
"""Tried where none are given; selective helps eager attention only."""

_MAX = 20_000
"""Candidates of one plan."""


@dataclass(frozen=True)
class Space:
    """What is tried: all combinations that fit in memory.

    `job` gives model, global batch and precision; its cluster, strategy, GPUs, micro-batch and
    recomputation are replaced. `gpus` is as in `grid.gpu_counts`. `micro_batches` None stands for
    all powers of two. A GPU's memory may be used but for the share `headroom`.
    """

    job: Case
    clusters: tuple[str | Cluster, ...]
    strategies: tuple[str | Strategy, ...] = STRATEGIES
    gpus: Any = None
    micro_batches: tuple[int, ...] | None = None
    recomputes: tuple[Recompute, ...] = RECOMPUTES
    headroom: float = 0.1

    @cached_property
    def global_batch(self) -> int:
        """Samples of a step: given, or those of a published training (`prediction.batch`)."""
        return self._batch[0]

    @property
    def batch_source(self) -> str:
        """Where the global batch comes from; empty if it was given."""
        return self._batch[1]

    @cached_property
    def _batch(self) -> tuple[int, str]:
        model = replace(self.job, cluster=self.clusters[0]).load()[1].value
        return samples_of(self.job.global_batch or AUTO, model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A case that fits in memory; its step keeps the busiest link busy for `link_time`."""

    case: Case
    link_time: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Cases to look at, and what was left out: too large for memory, or impossible, and why."""

    fitting: tuple[Fitting, ...]
    large: int
    impossible: dict[str, str]


def candidates(space: Space) -> Candidates:
    """All cases of a space whose memory fits.

    Raises OptionError for a space without any case that can be, or with too many.
    """
    check(space)
    found: list[Fitting] = []
    impossible: dict[str, str] = {}
    large = 0
    for cluster in space.clusters:
        for count in grid.gpu_counts(replace(space.job, cluster=cluster), space.gpus):
            if space.global_batch % -(-count // _together(space.job)):
                reason = f"they do not divide the global batch of {space.global_batch:,} samples"
                impossible[f"{count:,} GPUs"] = reason
                continue
            for strategy in space.strategies:
                case = replace(space.job, cluster=cluster, strategy=strategy, gpus=count)
                case = replace(case, global_batch=space.global_batch)
                try:
                    _check_workers(case)
                    fitting, over = _fitting(space, case)
                except Co2simError as error:
                    name = f"{grid.strategy_title(strategy)} on {count:,} GPUs"
                    impossible.setdefault(name, str(error))
                    continue
                found += fitting
                large += over
                if len(found) > _MAX:
                    raise OptionError(f"these are more than {_MAX:,} candidates; give fewer")
    if not found and not large:
        name, reason = next(iter(impossible.items()), ("", "no candidate is left"))
        raise OptionError(f"{name}: {reason}" if name else reason)
    return Candidates(fitting=tuple(found), large=large, impossible=impossible)


def check(space: Space) -> None:
    """Refuse what is given twice, or is out of range; load every input once."""
    if not 0 <= space.headroom < 1:
        raise OptionError(f"headroom is {space.headroom:g}; it must be 0 or more, and below 1")
    if not space.recomputes:
        raise OptionError("no recomputation is given, such as none or full")
    recomputes = [replace(space.job, recompute=one).recompute for one in space.recomputes]
    for what, values in (
        ("micro-batch", space.micro_batches or ()),
        ("recomputation", recomputes),
    ):
        if len(set(values)) < len(values):
            raise OptionError(f"a {what} is given twice: {', '.join(map(str, values))}")
    for micro in space.micro_batches or ():
        whole("micro_batch", micro, 1)
    grid.over_sizes(space.job, space.clusters, space.strategies, space.gpus)


def _fitting(space: Space, case: Case) -> tuple[list[Fitting], int]:
    """The cases of one cluster, size and strategy that fit, and how many do not."""
    samples = _samples(space, case)
    micros = [m for m in space.micro_batches or _powers(samples) if samples % m == 0]
    if case.interleave > 1:  # interleaved stages take micro-batches by turns
        micros = [m for m in micros if samples // m % case.pp == 0]
    if not micros:
        raise OptionError(
            f"no micro-batch divides the {samples} samples that a GPU has of the global batch"
        )
    recomputes = _applying(space, case)
    if has_auto_options(_parsed(case)):  # its memory is known once its numbers are
        sizes = [(recompute, micro) for recompute in recomputes for micro in micros]
        open_ = [replace(case, micro_batch=m, recompute=r) for r, m in sizes]
        return [Fitting(case=one, link_time=0.0) for one in open_], 0
    memory, link_time = _memory(case)
    room = case.load()[0].value.gpu.memory
    kept, large = [], 0
    for recompute in recomputes:
        for place, micro in enumerate(micros):
            one = replace(case, micro_batch=micro, recompute=recompute)
            if not fits(memory(micro, samples // micro, recompute), room, space.headroom):
                large += len(micros) - place  # more samples never take less
                break
            kept.append(Fitting(case=one, link_time=link_time))
    return kept, large


def _check_workers(case: Case) -> None:
    """Refuse local updates of one worker: it averages with none, and is its inner step."""
    strategy = _parsed(case)
    if isinstance(strategy, LocalSteps) and scale_of_case(case).workers == 1:
        raise OptionError(
            "one worker averages with none, and takes the steps of its inner strategy"
        )


def _applying(space: Space, case: Case) -> list[Recompute]:
    """The recomputations that the model has something for.

    Raises OptionError where it has none.
    """
    found: list[Recompute] = []
    reason = ""
    for recompute in space.recomputes:
        try:
            replace(case, recompute=recompute).job()
        except OptionError as error:
            reason = str(error)
        else:
            found.append(recompute)
    if not found:
        raise OptionError(reason)
    return found


def _together(case: Case) -> int:
    """GPUs that train on the same samples."""
    return case.tp * case.cp * case.pp


def _samples(space: Space, case: Case) -> int:
    """Of the global batch that GPUs which train together have."""
    assert case.gpus is not None
    return space.global_batch // -(-case.gpus // _together(case))


def _memory(case: Case) -> tuple[MemoryOf, Seconds]:
    """What a case takes, by how GPUs take their samples, and `link_time` of all these.

    What is sent is no less with more micro-steps.
    """
    if case.pp > 1:
        return StageMemory(case).total, 0.0
    prepared = first_step(case)
    return memory_of(prepared), _link_time(prepared)


def _parsed(case: Case) -> Strategy:
    return parse(case.strategy) if isinstance(case.strategy, str) else case.strategy


def _link_time(prepared: LoadedCase) -> Seconds:
    """Seconds for which the bytes of a step keep the links of a node, or of a site, busy.

    0 where a link is shaped, and lets bursts pass.
    """
    cluster, schedule = prepared.cluster, prepared.schedule
    sent = traffic(schedule, cluster)
    if any(shapers(cluster)[1:]):
        return 0.0
    far = sent.wan / cluster.wan.payload_bandwidth if cluster.wan else 0.0
    return max(sent.nic / cluster.inter.payload_bandwidth, far) / schedule.steps


def _powers(most: int) -> Sequence[int]:
    """Powers of two that divide it, from 1 on."""
    return [2**k for k in range(most.bit_length()) if most % 2**k == 0]


Want: TypeAlias = Literal["cheapest", "fastest", "least-energy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What is wanted of a training of `tokens` (those that ddp would train), within limits.

    `budget` is in the currency of the clusters, `deadline` in days, `power` in W at the meter.
    """

    want: Want
    tokens: float
    budget: float | None = None
    deadline: float | None = None
    power: float | None = None
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

    case: Case
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
        found = self.totals
        pairs = {
            "fastest": (found.days_low, found.days_high),
            "cheapest": (found.cost_low, found.cost_high),
            "least-energy": (found.energy_kwh_low, found.energy_kwh_high),
        }
        low, high = pairs[want]
        if low is not None and high is not None:
            return low, high
        if found.days_low is None or found.days_high is None:
            return None
        ratio = self.score(want) / found.days
        return found.days_low * ratio, found.days_high * ratio

    def within(self, wanted: Objective) -> bool:
        """Whether it is within all limits; what is not known is not."""
        limits = (
            (wanted.deadline, self.totals.days),
            (wanted.budget, self.totals.cost),
            (wanted.power, self.totals.power_w),
        )
        return all(most is None or (value is not None and value <= most) for most, value in limits)


_NAMED = {"cluster", "model", "strategy", "overrides", "noise"}


def command_of(case: Case, command: str = "run") -> str:
    """`co2sim COMMAND` with the options of the case, for a shell.

    Raises OptionError for a cluster or a model that is an object: a command line names files.
    """
    for thing in (case.cluster, case.model, case.stack):
        if isinstance(thing, Cluster | Model | Stack):
            raise OptionError(f"{thing.name} is an object; a command line takes names and files")
    return shlex.join(["co2sim", command, *_options(case)])


def with_tokens(command: str, tokens: float | None, goal: Goal = NO_GOAL) -> str:
    """The command with the tokens to train, and with the user's own step factors."""
    more = (
        []
        if tokens is None
        else ["--tokens", f"{tokens:g}" if float(f"{tokens:g}") == tokens else f"{tokens!r}"]
    )
    for name, factor in goal.factors.items():
        more += ["--steps-factor", f"{name}={factor!r}"]
    return f"{command} {shlex.join(more)}" if more else command


def _options(case: Case) -> Iterator[str]:
    strategy = case.strategy if isinstance(case.strategy, str) else title(case.strategy)
    yield from ("-c", str(case.cluster), "-m", str(case.model), "-s", strategy)
    if case.global_batch is None and case.accumulation is None:
        case = replace(case, accumulation=1)
    for field in fields(Case):
        value = getattr(case, field.name)
        if field.name in _NAMED or value in (None, OPEN.get(field.name, field.default)):
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
