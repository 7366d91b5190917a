"""What a question leaves open, chosen: the batch, recomputation, and how late averages are used.

A global batch may be given in tokens, or as "auto": that of the published training whose model is
nearest in size (`catalog/batches.toml`); where the micro-steps are given, they say it. With "auto"
for micro-batch and recomputation those are taken that fit in memory and are fastest, all others of
the question being as they are. A step has at least one sample for each group of GPUs that train on
the same ones, and as many for each.

"auto" of CO2 becomes numbers by what an average exposes: the time that a round takes beyond the
same round without averages, where communication slows no computing down. Training measures its own
tau by waiting alone, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeAlias

from co2sim.catalog.facts import read_table
from co2sim.common import convert, validation
from co2sim.common.delayed_averaging import LONGEST, bounded
from co2sim.common.errors import OptionError
from co2sim.common.progress import Done
from co2sim.common.units import Bytes, Seconds
from co2sim.models.operators import Model
from co2sim.prediction.bounds import Shared, StepBound
from co2sim.prediction.job import Job, with_short_rounds
from co2sim.prediction.notes import BATCH_OF, FASTEST
from co2sim.prediction.predict import step_time
from co2sim.prediction.question import AUTO, Question, tokens_of_batch
from co2sim.simulation.noise import QUIET
from co2sim.strategies import LocalSteps
from co2sim.strategies.co2 import CO2, has_auto_options
from co2sim.strategies.local import round_steps
from co2sim.training.framework import Recompute
from co2sim.training.workload import MAX_SAMPLES

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full", "full/2", "norms+activation")
"""What is tried, as far as the model and the stack have something for them."""

HEADROOM = 0.1
"""Of a GPU's memory that is left free: an allocator needs some, and predictions may be off."""

_IMAGES = (4096, "as ViT was trained (arXiv 2010.11929, table 3)")
_LATENTS = (256, "as DiT was trained (arXiv 2212.09748, section 4)")
"""Samples of a global batch of a model of images or latents."""

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
    return tuple(PublishedBatch(**row) for row in read_table("batches")["training"])


def published_like(model: Model) -> PublishedBatch:
    """The training whose model is nearest in size."""
    size = math.log(model.parameters)
    return min(published_batches(), key=lambda training: abs(math.log(training.parameters) - size))


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
        count, why = _LATENTS if model.unit == "latent" else _IMAGES
        return count, f"{count:,} {model.unit}s, {why}"
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


def choose(question: Question, done: Done | None = None) -> tuple[Question, tuple[str, ...]]:
    """The question with numbers in place of words, and a line on each choice.

    Chosen among ranks that are equal. Raises Co2simError as `Question.job` does.
    """
    question, lines = choose_batch(question, done)
    question, notes = choose_delay(question, done)
    return question, (*lines, *notes)


def is_open(question: Question) -> bool:
    """Whether the question has words in place of numbers for its batch or recomputation."""
    words = AUTO in {question.micro_batch, question.recompute}
    return words or isinstance(question.global_batch, str)


def choose_batch(question: Question, done: Done | None = None) -> tuple[Question, tuple[str, ...]]:
    """The question with numbers for its batch and recomputation, and a line on each."""
    if not is_open(question):
        return question, ()
    if question.global_batch == AUTO and question.accumulation is not None:
        question = replace(question, global_batch=None)
    if question.micro_batch != AUTO:
        validation.whole("micro_batch", convert.whole("micro_batch", question.micro_batch), 1)
    loaded = question.load()
    cluster, model = loaded[0].value, loaded[1].value
    gpus = cluster.layout.world_size if question.gpus is None else question.gpus
    groups = max(1, gpus // question.together)
    lines = []
    if isinstance(question.global_batch, str):
        wanted, source = samples_of(question.global_batch, model, adapters=bool(question.lora))
        micro = question.micro_batch
        unit = 1 if micro == AUTO else convert.whole("micro_batch", micro)
        unit *= 1 if question.takes(1) else question.pp  # stages take turns
        most = MAX_SAMPLES if question.global_batch == AUTO else math.inf
        share = min(wanted / groups / unit, most)
        each = _easily_divided(share) * unit
        question = replace(question, global_batch=each * groups, accumulation=None)
        lines += (
            [f"{BATCH_OF}{source}"] if source and abs(each * groups / wanted - 1) <= _NEAR else []
        )
        if each * groups > wanted * (1 + _NEAR):
            least = f"{unit} for each of {groups:,} groups of GPUs that train on the same samples"
            origin = f" ({source})" if source else ""
            lines.append(
                f"{BATCH_OF}{each * groups:,} samples, {least}: more than {wanted:,}{origin}"
            )
        elif share == MAX_SAMPLES:
            limit = f"{MAX_SAMPLES:,} micro-steps, the most that are simulated"
            lines.append(f"{BATCH_OF}{each * groups:,} samples, {limit}; {wanted:,} are asked")
        elif each * groups != wanted:
            among = f"{groups:,} groups of GPUs that train on the same samples"
            lines.append(f"{each * groups:,} samples: {wanted:,} do not divide among {among}")
    if isinstance(question.global_batch, int) and question.global_batch % groups:
        near = max(1, round(question.global_batch / groups)) * groups
        together = question.together
        who = "GPUs" if together == 1 else f"groups of {together} GPUs"
        raise OptionError(
            f"global_batch={question.global_batch} is not a multiple of {groups} {who}; {near} is"
        )
    if AUTO in {question.micro_batch, question.recompute}:
        best = _fastest(question, groups, done)
        lines.append(FASTEST)
        question = replace(question, micro_batch=best.micro_batch, recompute=best.recompute)
    return question, tuple(lines)


def fits(memory: Bytes, room: Bytes, headroom: float = HEADROOM) -> bool:
    """Whether they leave the headroom."""
    return memory <= room * (1 - headroom)


class _Batch(NamedTuple):
    """A candidate: how GPUs take their samples, and the memory that it needs."""

    micro_batch: int
    steps: int
    recompute: Recompute
    memory: Bytes


def _fastest(question: Question, groups: int, done: Done | None) -> _Batch:
    """The micro-batch and the recomputation that fit and are fastest.

    Where nothing leaves the headroom: those that need the least memory. Local updates are chosen by
    the steps between averages.
    """
    job = _of_one_sample(question, done)
    room = job.cluster.gpu.memory
    batches = _by_memory(question, job, groups)
    inside = [batch for batch in batches if fits(batch.memory, room)]
    if not inside:
        return min(batches, key=lambda batch: batch.memory)
    bound = StepBound(job, Shared())
    local = isinstance(job.strategy, LocalSteps)  # of these only passes are sure
    least = bound.quick if local else bound.close
    steps = job
    if question.pp == 1:
        steps = replace(job, strategy=with_short_rounds(job.strategy), averages=False)

    def most(batch: _Batch) -> float:
        """The most samples/s that a bound allows."""
        seconds = least(batch.micro_batch, batch.steps, batch.recompute).seconds
        return groups * batch.micro_batch * batch.steps / seconds if seconds else math.inf

    best: tuple[float, _Batch] | None = None
    bounds = [(most(batch), batch) for batch in inside]
    for speed_limit, batch in sorted(bounds, key=lambda pair: (-pair[0], pair[1].steps)):
        if best and speed_limit <= best[0] * _EQUAL:
            break
        sized = steps.with_batch(batch.micro_batch, batch.steps, batch.recompute)
        speed = groups * batch.micro_batch * batch.steps / step_time(sized, done)
        if best is None or speed > best[0] * _EQUAL:
            best = speed, batch
    assert best
    return best[1]


def _of_one_sample(question: Question, done: Done | None) -> Job:
    """The job among equal ranks, with one micro-step of one sample.

    What is still open of CO2 changes no memory, and is as short as it can be.
    """
    single = replace(
        question,
        noise=QUIET,
        rounds=None,
        fold=True,
        micro_batch=1,
        recompute="none",
        global_batch=None,
        accumulation=1,
    )
    strategy = single.parsed
    if isinstance(strategy, CO2) and has_auto_options(strategy) and single.pp == 1:
        single = replace(single, strategy=with_short_rounds(strategy))
    return choose_delay(single, done)[0].job()


def _by_memory(question: Question, job: Job, groups: int) -> list[_Batch]:
    """Every candidate with its memory.

    Without a pipeline, which smaller micro-batches may fill better, only the largest are tried, up
    to the first that is too large.
    """
    room = job.cluster.gpu.memory
    recomputes: Sequence[Recompute] = RECOMPUTES
    if question.recompute != AUTO:
        recomputes = [question.recompute]
    batches: list[_Batch] = []
    for recompute in job.applying(recomputes):
        sizes: list[_Batch] = []
        for micro, steps in _micro_batches(question, groups):
            sizes.append(_Batch(micro, steps, recompute, job.memory(micro, steps, recompute)))
            if sizes[-1].memory > room and question.pp == 1:
                break
        batches += sizes if question.pp > 1 else sizes[-_SIZES:]
    return batches


def _micro_batches(question: Question, groups: int) -> list[tuple[int, int]]:
    """Micro-batches with their micro-steps, from the smallest on."""
    if question.global_batch is None:
        steps = question.accumulation or 1
        if question.micro_batch != AUTO:
            return [(convert.whole("micro_batch", question.micro_batch), steps)]
        return [(2**power, steps) for power in range(_MOST)]
    samples = convert.whole("global_batch", question.global_batch) // groups
    if question.micro_batch != AUTO:
        micro = convert.whole("micro_batch", question.micro_batch)
        return [(micro, max(1, samples // micro))]
    pairs = [(micro, samples // micro) for micro in divisors(samples)]
    pairs = [pair for pair in pairs if pair[1] <= _MOST_STEPS] or pairs[-1:]
    by_turns = [pair for pair in pairs if question.takes(pair[1])]
    return by_turns or pairs[:1]


def divided(samples: int, groups: int) -> int:
    """The samples nearest to these that groups of GPUs divide, and that are easily divided further.

    Raises OptionError where the nearest are more than an eighth away.
    """
    nearest = _easily_divided(samples / groups) * groups
    if abs(nearest / samples - 1) > _NEAR:
        raise OptionError(
            f"they do not divide the global batch of {samples:,} samples, nor any near"
        )
    return nearest


def _easily_divided(share: float) -> int:
    """The nearest of 1, 2, 3, 4, 6, 8, 12, 16, ..., which many micro-batches divide.

    Where that is more than an eighth away: the nearest whole number.
    """
    if share <= 1:
        return 1
    unit = 2.0 ** max(0, math.floor(math.log2(share)) - 1)
    nearest = round(share / unit) * unit
    return int(nearest) if abs(nearest / share - 1) <= _NEAR else round(share)


def divisors(samples: int) -> list[int]:
    """Those up to 1,024, from the smallest on."""
    most = min(samples, 1 << (_MOST - 1))
    return [size for size in range(1, most + 1) if samples % size == 0]


def choose_delay(question: Question, done: Done | None = None) -> tuple[Question, tuple[str, ...]]:
    """The question with numbers for "auto" of CO2, and a line on each.

    Raises OptionError for stages of a pipeline, of which these are not chosen.
    """
    strategy = question.parsed
    if not isinstance(strategy, CO2) or not has_auto_options(strategy):
        return question, ()
    if question.pp > 1:
        raise OptionError(f"pp={question.pp}: tau and delay are not chosen for it; give numbers")
    quiet = even(replace(question, noise=QUIET, rounds=None, fold=True).job())
    # neither waiting for slower nodes nor computing more slowly beside an average is waiting for
    # the average: no longer round would hide it
    quiet = replace(quiet, cluster=replace(quiet.cluster, interference=0.0))

    def time_of(tried: CO2, averages: bool) -> Seconds:  # noqa: FBT001
        job = replace(quiet, strategy=tried, averages=averages)
        return step_time(job, done) * round_steps(tried)

    chosen, notes = resolve(strategy, time_of)
    if question.noise != QUIET:
        notes = tuple(f"{note} (without jitter, stragglers and speeds of nodes)" for note in notes)
    return replace(question, strategy=chosen), notes


def even(job: Job) -> Job:
    """The job with equal nodes and steps."""
    return replace(job, cluster=replace(job.cluster, node_spread=0.0, step_spread=0.0))


RoundTime: TypeAlias = Callable[[CO2, bool], Seconds]
"""How long a round takes on the cluster at hand, with its averages (True) or without them."""

_TOLERANCE = 0.01
"""Of a round: what may stay exposed of an average that counts as hidden."""


def resolve(strategy: CO2, round_time: RoundTime) -> tuple[CO2, tuple[str, ...]]:
    """The strategy with numbers for "auto", and what speaks for each number.

    tau: the shortest round that hides its average, if it is used when the round ends, but no
    shorter than a given delay or number of fragments; two steps at least where the fragments are
    chosen, too. delay: the least that hides the average; where none does, the least that is as good
    as waiting for a whole round. Hidden: at most 1 % of a round is exposed. Raises OptionError
    where no round that can be simulated is long enough.
    """
    times = cache(round_time)
    notes = []
    keep, predict, least = strategy.keep, strategy.predict, strategy.late.shortest_round
    strategy = replace(strategy, keep=None, predict=None)  # which change no time
    if strategy.tau == "auto":
        tau, note = _shortest_round(strategy, least, times)
        strategy = replace(strategy, tau=tau)
        notes.append(note)
    if strategy.delay == "auto":
        parts = strategy.parts()
        strategy = replace(strategy, fragments=parts)
        delay, note = _least_delay(strategy, times)
        strategy = replace(strategy, delay=delay, fragments=parts if parts > 1 else None)
        notes.append(note)
        if predict is not None:
            share = replace(strategy, keep=keep, predict=0).kept()[0]
            less = bounded(round_steps(strategy), delay, share, predict)
            if less != predict:
                notes.append(f"predict {predict:g} would repeat progress for ever: {less:g} taken")
            predict = less
    return replace(strategy, keep=keep, predict=predict), tuple(notes)


def _shortest_round(strategy: CO2, least: int, times: RoundTime) -> tuple[int, str]:
    def exposed(tau: int) -> float:
        tried = replace(strategy, tau=tau, delay=tau)
        return max(0.0, 1 - times(tried, False) / times(tried, True))  # noqa: FBT003

    guess = float(least)
    for _ in range(2):
        tried = round(guess)  # if it is too short, its average takes the whole of the round
        guess = max(least, (1 - _TOLERANCE) * tried / (1 - exposed(tried)))
        if guess > LONGEST:
            raise OptionError(
                f"{strategy.name}: tau=auto: no round of at most {LONGEST} steps hides its"
                f" average, which takes as long as about {guess:.0f} steps"
            )
    tau = least_that_holds(least, LONGEST, round(guess), lambda tau: exposed(tau) <= _TOLERANCE)
    note = f"tau {tau} chosen: {exposed(tau):.1%} of a round exposed by the average if delay={tau}"
    return tau, note + (f"; {tau - 1} would leave {exposed(tau - 1):.1%}" if tau > least else "")


def _least_delay(strategy: CO2, times: RoundTime) -> tuple[int, str]:
    tau = round_steps(strategy)
    latest = replace(strategy, delay=tau)

    def whole(delay: int) -> Seconds:
        return times(replace(strategy, delay=delay), True)  # noqa: FBT003

    bare = times(latest, False)  # noqa: FBT003
    # what is hidden if it is used at once is hidden if it is used later
    shortest = whole(1) if whole(1) - bare <= _TOLERANCE * whole(1) else whole(tau)
    hidden = shortest - bare <= _TOLERANCE * shortest

    def late(delay: int) -> Seconds:
        """What a longer delay could save."""
        return whole(delay) - (bare if hidden else shortest)

    guess = 1 + (late(1) / bare - _TOLERANCE) * tau
    delay = least_that_holds(
        1, tau, round(guess), lambda delay: late(delay) <= _TOLERANCE * (bare + late(delay))
    )
    shares = {tried: max(0.0, 1 - bare / whole(tried)) for tried in (delay, max(1, delay - 1))}
    note = f"delay {delay} chosen: {shares[delay]:.1%} of a round exposed by the average"
    if not hidden:
        note = f"no delay within a round hides the average, a longer tau might; {note}"
    return delay, note + (f"; {delay - 1} would leave {shares[delay - 1]:.1%}" if delay > 1 else "")


def least_that_holds(low: int, high: int, guess: int, holds: Callable[[int], bool]) -> int:
    """The least number from `low` on that `holds`, as all greater ones do; `high` if none does.

    Asked are numbers near the guess, then ever farther ones, then the middle of what is left.
    """
    trial, reach = min(max(guess, low), high - 1), 1
    while low < high:
        if holds(trial):
            high, nearby = trial, trial - reach
        else:
            low, nearby = trial + 1, trial + reach
        trial, reach = nearby if low <= nearby < high else (low + high) // 2, 2 * reach
    return high
