"""The batch that a question leaves open: how many samples a step has, and how GPUs take them.

A global batch may be given in tokens, or as "auto": that of the published training whose model is
nearest in size (`catalog/batches.toml`); where the micro-steps are given, they say it. With "auto"
for micro-batch and recomputation those are taken that fit in memory and are fastest, all others of
the case being as they are. A step has at least one sample for each group of GPUs that train on the
same ones, and as many for each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from co2sim.catalog.facts import read_table
from co2sim.common import convert, validation
from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Seconds
from co2sim.models.workload import BlockWork, Model
from co2sim.prediction.case import AUTO, Case, LoadedCase, tokens_of_batch
from co2sim.prediction.notes import BATCH_OF, FASTEST
from co2sim.prediction.pipeline import StageMemory
from co2sim.prediction.pipeline_order import chunks_of
from co2sim.simulation.collective_cost import traffic
from co2sim.simulation.compute_cost import compute_time
from co2sim.simulation.token_bucket import shapers
from co2sim.strategies import STRATEGIES, LocalSteps, parse

HEADROOM = 0.1
"""Of a GPU's memory that is left free: an allocator needs some, and predictions may be off."""

IMAGES = 4096
"""Of a global batch of images. Source: Dosovitskiy et al. 2021, arXiv 2010.11929, table 3."""

_SIZES = 7
"""Micro-batches that are tried of a kind of recomputation, up to the first that does not fit."""

_MOST_STEPS = 1024
"""Micro-steps that are tried, where larger micro-batches need fewer."""

_MOST = 11
"""Powers of two, from 1 on, that a micro-batch may be; the largest is 1,024."""


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


def samples_of(global_batch: int | str, model: Model) -> tuple[int, str]:
    """Samples of a global batch in numbers or words, and where they come from (for words).

    Those of a published training are a power of two. Raises OptionError for a batch in tokens of a
    model that has none.
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
        return max(1, round(tokens / model.tokens)), ""
    like = published_like(model)
    samples = max(1, int(2.0 ** round(math.log2(like.tokens / model.tokens))))
    return samples, f"{like.tokens / 1e6:g}M tokens, as of {like.name} ({like.source})"


MemoryOf: TypeAlias = Callable[[int, int, str], Bytes]
"""Bytes on a GPU by micro-batch, micro-steps and recomputation, without a simulation."""


def memory_of(prepared: LoadedCase) -> MemoryOf:
    """Of a case with one micro-step (`first_step`); for stages see `pipeline.StageMemory`."""

    def total(micro_batch: int, micro_steps: int, recompute: str) -> Bytes:
        job = replace(
            prepared.job, micro_batch=micro_batch, recompute=recompute, accumulation=micro_steps
        )
        return replace(prepared, job=job).memory()["total"]

    return total


def first_step(case: Case) -> LoadedCase:
    """The case with one micro-step of one sample: who meets whom is the same with more."""
    return _of_one_sample(case).prepare()


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
    groups = max(1, gpus // (case.tp * case.cp * case.pp))
    lines = []
    if isinstance(case.global_batch, str):
        wanted, source = samples_of(case.global_batch, model)
        unit = 1 if case.micro_batch == AUTO else convert.whole("micro_batch", case.micro_batch)
        unit *= case.pp if case.interleave > 1 else 1  # interleaved stages take turns
        share = wanted / groups / unit
        each = (
            _easily_divided(share) if case.global_batch == AUTO else max(1, round(share))
        ) * unit
        case = replace(case, global_batch=each * groups, accumulation=None)
        lines += [f"{BATCH_OF}{source}"] if source else []
        if each * groups != wanted:
            among = f"{groups:,} groups of GPUs that train on the same samples"
            lines.append(f"{each * groups:,} samples: {wanted:,} do not divide among {among}")
    if AUTO in {case.micro_batch, case.recompute}:
        case = _fastest(case, groups, cluster.gpu.memory, speed)
        lines.append(FASTEST)
    return case, tuple(lines)


def _fastest(case: Case, groups: int, room: Bytes, speed: Callable[[Case], float]) -> Case:
    """With the micro-batch and the recomputation that fit and are fastest.

    Where nothing leaves the headroom: those that need the least memory.
    """
    tried = _by_memory(case, groups)
    inside = [one for one, memory in tried if fits(memory, room)]
    if not inside:
        return min(tried, key=lambda pair: pair[1])[0]
    best: tuple[float, Case] | None = None
    links = _link_times(case)
    bounds = [(_bound(one, groups, links), one) for one in inside]
    for bound, one in sorted(bounds, key=lambda pair: (-pair[0], -int(pair[1].micro_batch))):
        if best and bound <= best[0]:
            break
        found = speed(one)
        if best is None or found > best[0]:
            best = found, one
    assert best
    return best[1]


def _by_memory(case: Case, groups: int) -> list[tuple[Case, Bytes]]:
    """Every candidate with its memory; of those too large for a size, larger ones are left out.

    Without a pipeline, which smaller micro-batches may fill better, only the largest are tried.
    """
    alone = _of_one_sample(case)
    memory = StageMemory(alone).total if case.pp > 1 else memory_of(alone.prepare())
    room = case.load()[0].value.gpu.memory
    found: list[tuple[Case, Bytes]] = []
    for recompute in _recomputations(case):
        sizes: list[tuple[Case, Bytes]] = []
        for micro, steps in _micro_batches(case, groups):
            one = replace(case, micro_batch=micro, recompute=recompute)
            sizes.append((one, memory(micro, steps, recompute)))
            if sizes[-1][1] > room:
                break
        found += sizes if case.pp > 1 else sizes[-_SIZES:]
    return found


def _recomputations(case: Case) -> list[str]:
    if case.recompute != AUTO:
        return [case.recompute]
    job = _of_one_sample(case).job()
    if not any(block.boundary_bytes for block in job.model.blocks):
        return ["none"]
    partly = replace(job, recompute="selective")
    helps = any(partly.repeats_products(b) or partly.repeats_attention(b) for b in job.model.blocks)
    return ["none", "selective", "full"] if helps else ["none", "full"]


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


def _easily_divided(share: float) -> int:
    """The nearest of 1, 2, 3, 4, 6, 8, 12, 16, ...: many micro-batches divide it."""
    if share <= 1:
        return 1
    unit = 2.0 ** max(0, math.floor(math.log2(share)) - 1)
    return int(round(share / unit) * unit)


def divisors(number: int) -> list[int]:
    """Those up to 1,024, from the smallest on."""
    return [one for one in range(1, min(number, 1 << (_MOST - 1)) + 1) if number % one == 0]


def link_time(prepared: LoadedCase) -> Seconds:
    """Seconds for which the bytes of a step keep the links of a node, or of a site, busy.

    0 where a link is shaped, and lets bursts pass.
    """
    cluster, schedule = prepared.cluster, prepared.schedule
    if any(shapers(cluster)[1:]):
        return 0.0
    sent = traffic(schedule, cluster)
    far = sent.wan / cluster.wan.payload_bandwidth if cluster.wan else 0.0
    return max(sent.nic / cluster.inter.payload_bandwidth, far) / schedule.steps


def _link_times(case: Case) -> tuple[Seconds, Seconds]:
    """`link_time` of one micro-step of one sample, and what each further one adds.

    A strategy of the user's own may send what it likes in further ones. Local updates are chosen
    by their local steps.
    """
    strategy = parse(case.strategy) if isinstance(case.strategy, str) else case.strategy
    if case.pp > 1 or isinstance(strategy, LocalSteps):
        return 0.0, 0.0
    one, two = (
        link_time(replace(_of_one_sample(case), accumulation=steps).prepare()) for steps in (1, 2)
    )
    return one, two - one if type(strategy) in STRATEGIES.values() else 0.0


def _bound(case: Case, groups: int, links: tuple[Seconds, Seconds]) -> float:
    """Samples/s if GPUs did nothing but passes, or nothing but send.

    A stage of a pipeline has all its micro-batches to pass. Before the first one, and behind the
    last, those before it pass over their first chunks.
    """
    whole, gpu = case.job(), case.load()[0].value.gpu

    def passes(work: BlockWork) -> Seconds:
        return sum(compute_time(one, gpu, whole.precision) for one in (work.forward, work.backward))

    jobs = [whole.share] if case.pp == 1 else case.stage_jobs()
    longest = ahead = 0.0
    for number, job in enumerate(jobs):
        times = [passes(work) for work in job.works()]
        longest = max(longest, whole.accumulation * sum(times) + ahead)
        if case.pp > 1:
            chunks = chunks_of(whole.share, number, case.pp, case.interleave)
            ahead += sum(times[: len(chunks[0])])
    samples = groups * whole.samples_per_gpu
    longest = max(longest, links[0] + (whole.accumulation - 1) * links[1])
    return samples / longest if longest else math.inf
