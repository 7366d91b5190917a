"""The batch that a question leaves open: how many samples a step has, and how GPUs take them.

A global batch may be given in tokens, or as "auto": that of the published training whose model is
nearest in size (`catalog/batches.toml`); where the micro-steps are given, they say it. With "auto"
for micro-batch and recomputation those are taken that fit in memory and are fastest, all others of
the case being as they are. A step has at least one sample for each group of GPUs that train on the
same ones, and as many for each.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from co2sim.catalog.facts import read_table
from co2sim.common import convert, validation
from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes
from co2sim.models.recompute import Recompute
from co2sim.models.workload import MAX_SAMPLES, Model, Workload
from co2sim.prediction.bounds import Shared, StepBound
from co2sim.prediction.case import AUTO, Case, LoadedCase, tokens_of_batch
from co2sim.prediction.notes import BATCH_OF, FASTEST
from co2sim.prediction.pipeline import StageMemory
from co2sim.strategies import LocalSteps, parse

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full", "full/2", "norms+activation")
"""What is tried, as far as the model and the stack have something for them."""

HEADROOM = 0.1
"""Of a GPU's memory that is left free: an allocator needs some, and predictions may be off."""

IMAGES = 4096
"""Of a global batch of images. Source: Dosovitskiy et al. 2021, arXiv 2010.11929, table 3."""

ADAPTERS = 128
"""Samples of a global batch of fine-tuning. Source: Taori et al. 2023, Stanford Alpaca, README:
batch size 128 for LLaMA 7B and 13B."""

_NEAR = 0.126
"""How far a batch may be from what is asked, so that GPUs can take it in many ways."""

_SIZES = 7
"""Micro-batches that are tried of a kind of recomputation, up to the first that does not fit."""

_MOST_STEPS = 1024
"""Micro-steps that are tried, where larger micro-batches need fewer."""

_MOST = 11
"""Powers of two, from 1 on, that a micro-batch may be; the largest is 1,024."""

_EQUAL = 1 + 1e-9
"""Speeds that differ by less are equal: then the one that computes less is taken."""


@dataclass(frozen=True, slots=True)
class PublishedBatch:
    """The global batch of a published training, in tokens."""

    name: str
    parameters: float
    tokens: float
    source: str


def published_batches() -> tuple[PublishedBatch, ...]:
    """Those of `catalog/batches.toml`."""
    return tuple(PublishedBatch(**one) for one in read_table("batches")["training"])


def published_like(model: Model) -> PublishedBatch:
    """The training whose model is nearest in size."""
    size = math.log(model.parameters)
    return min(published_batches(), key=lambda one: abs(math.log(one.parameters) - size))


def samples_of(global_batch: int | str, model: Model, *, adapters: bool = False) -> tuple[int, str]:
    """Samples of a global batch in numbers or words, and where they come from (for words).

    Those of a published training are a power of two; of `adapters` it is fine-tuning. Raises
    OptionError for a batch in tokens of a model that has none.
    """
    if isinstance(global_batch, int):
        return global_batch, ""
    tokens = tokens_of_batch(global_batch)
    if model.unit != "token":
        if tokens is not None:
            raise OptionError(
                f"global_batch is {global_batch!r}; the samples of {model.name} are {model.unit}s:"
                " give their number"
            )
        return IMAGES, f"{IMAGES:,} {model.unit}s, as ViT was trained (arXiv 2010.11929)"
    if tokens is not None:
        return _easily_divided(tokens / model.tokens), ""
    if adapters:
        return (
            ADAPTERS,
            f"{ADAPTERS} samples, as of Alpaca (Taori et al. 2023, README of its release)",
        )
    like = published_like(model)
    samples = max(1, int(2.0 ** round(math.log2(like.tokens / model.tokens))))
    return samples, f"{like.tokens / 1e6:g}M tokens, as of {like.name} ({like.source})"


MemoryOf: TypeAlias = Callable[[int, int, str], Bytes]
"""Bytes on a GPU by micro-batch, micro-steps and recomputation, without a simulation."""


def memory_of(prepared: LoadedCase) -> MemoryOf:
    """Of a case with one micro-step of one sample; for stages see `pipeline.StageMemory`."""

    def total(micro_batch: int, micro_steps: int, recompute: str) -> Bytes:
        job = replace(
            prepared.job, micro_batch=micro_batch, recompute=recompute, accumulation=micro_steps
        )
        return replace(prepared, job=job).memory()["total"]

    return total


def _of_one_sample(case: Case) -> Case:
    return replace(case, global_batch=None, accumulation=1, micro_batch=1, recompute="none")


def fits(memory: Bytes, room: Bytes, headroom: float = HEADROOM) -> bool:
    """Whether they leave the headroom."""
    return memory <= room * (1 - headroom)


def is_open(case: Case) -> bool:
    """Whether the case has words in place of numbers."""
    return isinstance(case.global_batch, str) or AUTO in {case.micro_batch, case.recompute}


def settled(case: Case, speed: Callable[[Case], float]) -> tuple[Case, tuple[str, ...]]:
    """The case with numbers in place of words, and a line on what was chosen.

    `speed` simulates a case with numbers: samples/s. Raises Co2simError as `Case.prepare` does.
    """
    if not is_open(case):
        return case, ()
    if case.global_batch == AUTO and case.accumulation is not None:
        case = replace(case, global_batch=None)
    if case.micro_batch != AUTO:
        validation.whole("micro_batch", convert.whole("micro_batch", case.micro_batch), 1)
    loaded = case.load()
    cluster, model = loaded[0].value, loaded[1].value
    gpus = cluster.layout.world_size if case.gpus is None else case.gpus
    groups = max(1, gpus // case.together)
    lines = []
    if isinstance(case.global_batch, str):
        wanted, source = samples_of(case.global_batch, model, adapters=case.lora is not None)
        unit = 1 if case.micro_batch == AUTO else convert.whole("micro_batch", case.micro_batch)
        unit *= case.pp if case.interleave > 1 else 1  # interleaved stages take turns
        share = min(wanted / groups / unit, MAX_SAMPLES if case.global_batch == AUTO else math.inf)
        each = _easily_divided(share) * unit
        case = replace(case, global_batch=each * groups, accumulation=None)
        lines += (
            [f"{BATCH_OF}{source}"] if source and abs(each * groups / wanted - 1) <= _NEAR else []
        )
        if each * groups > wanted * (1 + _NEAR):
            least = f"{unit} for each of {groups:,} groups of GPUs that train on the same samples"
            told = f" ({source})" if source else ""
            lines.append(
                f"{BATCH_OF}{each * groups:,} samples, {least}: more than {wanted:,}{told}"
            )
        elif share == MAX_SAMPLES:
            told = f"{MAX_SAMPLES:,} micro-steps, the most that are simulated"
            lines.append(f"{BATCH_OF}{each * groups:,} samples, {told}; {wanted:,} are asked")
        elif each * groups != wanted:
            among = f"{groups:,} groups of GPUs that train on the same samples"
            lines.append(f"{each * groups:,} samples: {wanted:,} do not divide among {among}")
    if isinstance(case.global_batch, int) and case.global_batch % groups:
        near = max(1, round(case.global_batch / groups)) * groups
        together = case.together
        who = "GPUs" if together == 1 else f"groups of {together} GPUs"
        raise OptionError(
            f"global_batch={case.global_batch} is not a multiple of {groups} {who}; {near} is"
        )
    if AUTO in {case.micro_batch, case.recompute}:
        case = _fastest(case, groups, cluster.gpu.memory, speed)
        lines.append(FASTEST)
    return case, tuple(lines)


def _fastest(case: Case, groups: int, room: Bytes, speed: Callable[[Case], float]) -> Case:
    """With the micro-batch and the recomputation that fit and are fastest.

    Where nothing leaves the headroom: those that need the least memory.
    """
    tried = _by_memory(case, groups)
    inside = [one for one in tried if fits(one.memory, room)]
    if not inside:
        return min(tried, key=lambda one: one.memory).case
    best: tuple[float, Case] | None = None
    bound_of = _bound(case, groups)
    bounds = [(bound_of(one), one.steps, one.case) for one in inside]
    for bound, _, one in sorted(bounds, key=lambda found: (-found[0], found[1])):
        if best and bound <= best[0] * _EQUAL:
            break
        found = speed(one)
        if best is None or found > best[0] * _EQUAL:
            best = found, one
    assert best
    return best[1]


class _Taken(NamedTuple):
    """A candidate, its micro-steps, and the memory that it needs."""

    case: Case
    steps: int
    memory: Bytes


def _by_memory(case: Case, groups: int) -> list[_Taken]:
    """Every candidate with its memory.

    Without a pipeline, which smaller micro-batches may fill better, only the largest are tried, up
    to the first that is too large.
    """
    alone = _of_one_sample(case)
    memory = StageMemory(alone).total if case.pp > 1 else memory_of(alone.prepare())
    room = case.load()[0].value.gpu.memory
    found: list[_Taken] = []
    for recompute in _recomputations(case):
        sizes: list[_Taken] = []
        for micro, steps in _micro_batches(case, groups):
            one = replace(case, micro_batch=micro, recompute=recompute)
            sizes.append(_Taken(one, steps, memory(micro, steps, recompute)))
            if sizes[-1].memory > room and case.pp == 1:
                break
        found += sizes if case.pp > 1 else sizes[-_SIZES:]
    return found


def _recomputations(case: Case) -> Sequence[str]:
    if case.recompute != AUTO:
        return [case.recompute]
    return applying(RECOMPUTES, _of_one_sample(case))


def applying(recomputes: Sequence[Recompute], case: Case) -> tuple[Recompute, ...]:
    """Those that the model, and the stack, have something for. Raises OptionError for none."""
    found: list[Recompute] = []
    reason = ""
    for recompute in recomputes:
        try:
            job = replace(case, recompute=recompute).job()
        except OptionError as error:
            reason = str(error)
        else:
            if recompute != "selective" or len(recomputes) == 1 or _repeats_some(job):
                found.append(recompute)
    if not found:
        raise OptionError(reason)
    return tuple(found)


def _repeats_some(job: Workload) -> bool:
    """Whether selective recomputation is other than none."""
    return any(job.repeats_products(one) or job.repeats_attention(one) for one in job.model.blocks)


def _micro_batches(case: Case, groups: int) -> list[tuple[int, int]]:
    """Micro-batches with their micro-steps, from the smallest on."""
    if case.global_batch is None:
        steps = case.accumulation or 1
        if case.micro_batch != AUTO:
            return [(convert.whole("micro_batch", case.micro_batch), steps)]
        return [(2**power, steps) for power in range(_MOST)]
    samples = convert.whole("global_batch", case.global_batch) // groups
    if case.micro_batch != AUTO:
        micro = convert.whole("micro_batch", case.micro_batch)
        return [(micro, max(1, samples // micro))]
    found = [(micro, samples // micro) for micro in divisors(samples)]
    found = [pair for pair in found if pair[1] <= _MOST_STEPS] or found[-1:]
    whole = [pair for pair in found if case.interleave == 1 or pair[1] % case.pp == 0]
    return whole or found[:1]


def divided(samples: int, groups: int) -> int:
    """The samples nearest to these that groups of GPUs divide, and that are easily divided further.

    Raises OptionError where the nearest are more than an eighth away.
    """
    found = _easily_divided(samples / groups) * groups
    if abs(found / samples - 1) > _NEAR:
        raise OptionError(
            f"they do not divide the global batch of {samples:,} samples, nor any near"
        )
    return found


def _easily_divided(share: float) -> int:
    """The nearest of 1, 2, 3, 4, 6, 8, 12, 16, ..., which many micro-batches divide.

    Where that is more than an eighth away: the nearest whole number.
    """
    if share <= 1:
        return 1
    unit = 2.0 ** max(0, math.floor(math.log2(share)) - 1)
    found = round(share / unit) * unit
    return int(found) if abs(found / share - 1) <= _NEAR else round(share)


def divisors(number: int) -> list[int]:
    """Those up to 1,024, from the smallest on."""
    return [one for one in range(1, min(number, 1 << (_MOST - 1)) + 1) if number % one == 0]


def _bound(case: Case, groups: int) -> Callable[[_Taken], float]:
    """The most samples/s of a candidate: see `prediction.bounds`.

    Local updates are chosen by their local steps, which do nothing but pass for sure.
    """
    bound = StepBound(_of_one_sample(case), Shared())
    strategy = parse(case.strategy) if isinstance(case.strategy, str) else case.strategy
    least = bound.quick if isinstance(strategy, LocalSteps) else bound.close

    def most(one: _Taken) -> float:
        micro = convert.whole("micro_batch", one.case.micro_batch)
        seconds = least(micro, one.steps, one.case.recompute).seconds
        return groups * micro * one.steps / seconds if seconds else math.inf

    return most
