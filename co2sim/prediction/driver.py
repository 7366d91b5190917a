"""A question, answered by simulation."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from inspect import Parameter, Signature, signature
from typing import Any, Unpack, get_type_hints

from co2sim.common import convert
from co2sim.common.convert import Reference
from co2sim.common.errors import Co2simError, OptionError, nearest
from co2sim.common.progress import Done, progress_bar
from co2sim.common.units import Seconds, counted, figures
from co2sim.hardware.cluster import Cluster
from co2sim.models.operators import Model
from co2sim.prediction.choose import choose, choose_batch, even
from co2sim.prediction.evidence import by_distance, published_gpus
from co2sim.prediction.intervals import (
    Predicted,
    memory_ends,
    of_site,
    setting_of,
)
from co2sim.prediction.job import Job
from co2sim.prediction.likeness import traits_of
from co2sim.prediction.notes import (
    ONE_SITE,
    budget_limit,
    host_limits,
    low_cap,
    offloaded,
    rate_of_a_gpu,
    remarks,
)
from co2sim.prediction.predict import predict, step_time
from co2sim.prediction.question import AUTO, OPEN_BATCH, Options, Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, scale_of, step_factor
from co2sim.schedule.schedule import Schedule
from co2sim.simulation import metrics
from co2sim.simulation.noise import QUIET, Noise
from co2sim.simulation.run import Simulator
from co2sim.simulation.trace import Trace
from co2sim.strategies import LocalSteps, Strategy, parse

_ROUNDS = "simulating rounds"
_ASKED = {"cluster", "model", "strategy"}
_PATIENCE: Seconds = 1.0
"""What a simulation takes before it shows a bar."""


def simulate(
    cluster: Reference | Cluster,
    model: Reference | Model,
    strategy: str | Strategy,
    *,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Result:
    """Simulate one configuration. Raises Co2simError, with one line, for anything that is wrong.

    Args:
        cluster: Catalog name (`co2sim list clusters`), path of a TOML file, or a `Cluster`.
        model: Catalog name, path of a TOML file or of a Hugging Face config.json, or a `Model`.
        strategy: A text such as "co2(tau=48, worker=node)", or an object such as `CO2(tau=48)`.
        progress: Show a bar on stderr; default: if it is a terminal, after a second.
        options: The fields of `Question`, such as `gpus=128`, and those of `Noise`, such as
            `jitter=0.05`. What is not given of the batch and of recomputation is chosen, as
            `co2sim run` does: `accumulation=1, micro_batch=1` is one sample per GPU. `overrides`
            are other numbers of the cluster or model, such as {"inter.bandwidth": "25 Gbit/s",
            "model.seq_len": 4096}; `noise` is a `Noise`.

    >>> simulate("a100-tcp80", "llama-7b", "co2(tau=48, worker=node)", gpus=128).fits_in_memory
    True
    """
    return run(make_case(cluster, model, strategy, **options), progress=progress)


_OPTIONS = [f.name for f in (*fields(Question), *fields(Noise)) if f.name not in _ASKED]
"""The names of all options."""


def _keywords() -> Signature:
    """The signature of `simulate` with every option, for shells and notebooks that complete it."""
    parameters = signature(simulate).parameters
    defaults = {f.name: f.default for f in (*fields(Question), *fields(Noise))} | OPEN_BATCH
    hints = get_type_hints(Question) | get_type_hints(Noise)
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=hints[name], default=default)
        for name in _OPTIONS
        for default in [None if defaults[name] is MISSING else defaults[name]]
    ]
    *places, progress, _ = parameters.values()
    return Signature([*places, *options, progress], return_annotation=Result)


simulate.__signature__ = _keywords()  # type: ignore[attr-defined]
simulate.__doc__ = (simulate.__doc__ or "").replace(
    "        options: The",
    "".join(
        f"        {one.name}: {one.metadata['option'].help}\n"
        for one in (*fields(Question), *fields(Noise))
        if "option" in one.metadata
    )
    + "        noise: What makes ranks differ, as an object.\n        options: The",
)


def make_case(
    cluster: Reference | Cluster,
    model: Reference | Model,
    strategy: str | Strategy,
    **options: Unpack[Options],
) -> Question:
    """The case that the arguments of `simulate` describe; what they leave open is "auto"."""
    values: dict[str, Any] = {**options}
    unknown = [name for name in values if name not in _OPTIONS]
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}; {nearest(unknown[0], _OPTIONS)}")
    uneven = {f.name: values.pop(f.name) for f in fields(Noise) if f.name in values}
    noise = _noise(uneven.pop("node_speed", None) or {}, uneven)
    if values.get("overrides", {}) is None:
        del values["overrides"]
    if noise != QUIET:
        if values.get("noise", QUIET) != QUIET:
            raise OptionError("give noise, or jitter, straggle, seed and node_speed, not both")
        values["noise"] = noise
    values = OPEN_BATCH | values | {"cluster": cluster, "model": model, "strategy": strategy}
    return Question(**values)


def _noise(node_speed: Any, others: Mapping[str, Any]) -> Noise:
    """Noise from values as users give them."""
    if not isinstance(node_speed, Mapping):
        raise OptionError(f"node_speed is {convert.shown(node_speed)}; it must map nodes to speeds")
    speeds = {
        convert.whole("node", node): convert.number(f"speed of node {node}", speed)
        for node, speed in node_speed.items()
    }
    return Noise(node_speed=speeds, **convert.declared(Noise, others))


def run(question: Question, *, progress: bool | None = False, beside: bool = True) -> Result:
    """Choose what the question leaves open, predict, and say how sure that is.

    `progress` as in `simulate`. Without `beside` it simulates nothing else to say more of it: there
    is no delay by slower ranks, no warning of a small budget, and no site alone.
    """
    with progress_bar(_ROUNDS, shown=progress, after=_PATIENCE) as done:
        question, chosen = choose(question.inlined(), done)
        if question.pp > 1 and question.interval == "full":
            raise OptionError(f"pp={question.pp}: interval=full needs a schedule; take quick")
        job = question.job()
        result = predict(job, done)
        result = replace(
            result,
            notes=(*chosen, *_remarks(question, job, result)),
            warnings=(*rate_of_a_gpu(question, job.cluster), *low_cap(job.cluster)),
        )
        if beside:
            times = {name: step_time(other, done) for name, other in _beside(job).items()}
            result = replace(
                result,
                straggler_delay_s=_straggler_delay(result, times),
                notes=(*result.notes, *_one_site_alone(question, job, result)),
                warnings=(*result.warnings, *_warnings(job, result, times)),
            )
        return _with_interval(question, job, result, done)


_EVEN, _BETTER = "even", "better"


def _beside(job: Job) -> dict[str, Job]:
    """What is simulated besides, to say more of a result.

    Where ranks differ, the same among equal ones; where a budget of the strategy is smaller than
    blocks need, a larger one.
    """
    quiet = even(replace(job, options=replace(job.options, noise=QUIET)))
    limit = budget_limit(job)
    others = {_EVEN: quiet} if _uneven(job) else {}
    if limit is not None:
        others[_BETTER] = replace(quiet, strategy=limit.better)
    return others


def _uneven(job: Job) -> bool:
    """Whether nodes or steps differ in time."""
    cluster = job.stage_cluster
    return job.options.noise.uneven or bool(cluster.node_spread or cluster.step_spread)


def _straggler_delay(result: Result, beside: Mapping[str, Seconds]) -> Seconds | None:
    if _EVEN not in beside:
        return None
    return metrics.straggler_delay(result.round_time_s, beside[_EVEN] * result.steps_per_round)


def _warnings(job: Job, result: Result, beside: Mapping[str, Seconds]) -> tuple[str, ...]:
    limit = budget_limit(job)
    if limit is None:
        return ()
    equal = beside.get(_EVEN, result.step_time_s)
    return limit.warning(result, equal / beside[_BETTER])


def _remarks(question: Question, job: Job, result: Result) -> tuple[str, ...]:
    """Notes on what a reader may not expect."""
    work = job.workload
    split = work.uneven_split(len(job.model.blocks) - 2) if work.pp > 1 else None
    return (
        *([split] if split else []),
        *_one_of_several_sites(question, job.cluster),
        *offloaded(job),
        *remarks(job, result.gpus, question.asked),
        *host_limits(result.host_load if job.cluster.gpu.kernels else None),
    )


def _one_of_several_sites(question: Question, sized: Cluster) -> tuple[str, ...]:
    """A remark where fewer GPUs than a cluster has are at one of its sites."""
    every = question.load()[0].value
    if every.sites == sized.sites:
        return ()
    count = counted(sized.layout.world_size, "GPU")
    smaller = f"--set nodes={sized.nodes}"
    return (f"{count} at one site, of {every.sites}: no WAN is crossed; smaller sites: {smaller}",)


def _one_site_alone(question: Question, job: Job, result: Result) -> tuple[str, ...]:
    """A remark on what needs no WAN: the GPUs of one site, with the same global batch.

    Sites that are workers then take the steps that they take inside.
    """
    sites, strategy = job.cluster.sites, job.strategy
    if sites == 1 or question.noise != QUIET:
        return ()
    if isinstance(strategy, LocalSteps) and strategy.worker == "site":
        strategy = parse(strategy.inner or "zero2")
    site = replace(
        question,
        strategy=strategy,
        gpus=result.gpus // sites,
        global_batch=result.global_batch,
        accumulation=None,
        micro_batch=AUTO,
    )
    try:
        alone = predict(choose_batch(site)[0].job())
    except Co2simError:  # what a site cannot do alone is no alternative
        return ()
    who = f"{ONE_SITE}, {counted(alone.gpus, 'GPU')} with {alone.strategy}"
    times = alone.tokens_per_s / result.tokens_per_s
    text = f"{who}: {alone.tokens_per_s:,.0f} {alone.unit}s/s, {figures(times)} times as many"
    factors = [
        step_factor(answer.strategy, scale_of(answer), NO_GOAL) for answer in (result, alone)
    ]
    if all(factors) and factors[0] != factors[1]:
        worth = times * factors[0].factor / factors[1].factor  # type: ignore[union-attr]
        text += f", and {figures(worth)} times as fast to the same loss"
    return (text,)


def _with_interval(question: Question, job: Job, result: Result, done: Done | None) -> Result:
    """The result with the ends of its intervals; memory of processors has none."""
    cluster = job.stage_cluster
    setting, gpu = setting_of(job, result), cluster.gpu
    is_known = gpu.kernels is not None and (not gpu.stack or setting.gpu in published_gpus())
    setting = replace(setting, strange=not is_known)
    predicted = Predicted(
        cluster=job.cluster,
        tokens_per_s=result.tokens_per_s,
        setting=setting,
        measured=of_site(setting, job.measured),
    )
    speeds = None
    if question.interval == "full":
        speeds = [
            [_speed_on(moved, job, result, done) for moved in pair] for pair in predicted.moved()
        ]
    interval = predicted.interval(speeds)
    ends: dict[str, Any] = {}
    if interval.by_runs:  # the nearest says how far these are
        ends["nearest_published"] = by_distance(traits_of(cluster, job.model, result))[0][0]
    if cluster.backend == "nccl":
        low, high, source = memory_ends(
            result.memory_bytes_per_gpu["total"], result.stack, job.least_memory()
        )
        ends |= {"memory_bytes_low": low, "memory_bytes_high": high}
        ends["memory_interval_source"] = source
    return replace(
        result,
        tokens_per_s_low=interval.low,
        tokens_per_s_high=interval.high,
        interval_source=interval.source,
        **ends,
    )


def _speed_on(cluster: Cluster, job: Job, result: Result, done: Done | None) -> float:
    """Tokens/s on a changed cluster of the same layout."""
    moved = step_time(replace(job, cluster=cluster), done)
    return result.tokens_per_s * result.step_time_s / moved


def trace(question: Question, *, progress: bool | None = False) -> tuple[Schedule, Trace]:
    """The schedule of a question and its simulated trace, warm-up included."""
    with progress_bar(_ROUNDS, shown=progress, after=_PATIENCE) as done:
        stage = choose(question, done)[0].stage()
        simulator = Simulator(stage.job.options, stage, done)
        spans = simulator.until_steady()[0]
        if spans.rounds == 1:  # two show where one ends
            spans = simulator.rounds(2)
        return stage.schedule, spans


def resolve_auto(question: Question) -> Question:
    """The question with numbers for "auto", chosen by simulation without noise."""
    return choose(question)[0]
