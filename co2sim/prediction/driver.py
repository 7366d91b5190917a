"""A question, answered by simulation."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from inspect import Parameter, Signature, signature
from typing import Any, Unpack, get_type_hints

from co2sim import strategies
from co2sim.common import convert
from co2sim.common.convert import Reference
from co2sim.common.errors import Co2simError, OptionError, nearest
from co2sim.common.progress import Done, progress_bar
from co2sim.common.units import Seconds, counted, figures
from co2sim.hardware.cluster import Cluster
from co2sim.models.workload import Model
from co2sim.prediction import auto_delay, batch, pipeline
from co2sim.prediction.case import AUTO, OPEN_BATCH, Case, LoadedCase, Options
from co2sim.prediction.error_model import Situation, error_model
from co2sim.prediction.evidence import (
    from_measured,
    nearest_to,
    published_gpus,
    setting_of,
)
from co2sim.prediction.intervals import Interval, Predicted
from co2sim.prediction.micro_steps import case_figures
from co2sim.prediction.notes import host_limits, offloaded
from co2sim.prediction.notes import remarks as remarks_on
from co2sim.prediction.notes import warnings as warnings_of
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, scale_of, step_factor
from co2sim.schedule.schedule import Schedule
from co2sim.simulation import metrics
from co2sim.simulation.noise import QUIET, Noise
from co2sim.simulation.run import Simulator
from co2sim.simulation.trace import Trace
from co2sim.strategies import STRATEGIES, LocalSteps, Strategy, parse, with_options
from co2sim.strategies.co2 import CO2

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
        options: The fields of `Case`, such as `gpus=128`, and those of `Noise`, such as
            `jitter=0.05`. What is not given of the batch and of recomputation is chosen, as
            `co2sim run` does: `accumulation=1, micro_batch=1` is one sample per GPU. `overrides`
            are other numbers of the cluster or model, such as {"inter.bandwidth": "25 Gbit/s",
            "model.seq_len": 4096}; `noise` is a `Noise`.

    >>> simulate("a100-tcp80", "llama-7b", "co2(tau=48, worker=node)", gpus=128).fits_in_memory
    True
    """
    return run(make_case(cluster, model, strategy, **options), progress=progress)


_OPTIONS = [f.name for f in (*fields(Case), *fields(Noise)) if f.name not in _ASKED]
"""The names of all options."""


def _keywords() -> Signature:
    """The signature of `simulate` with every option, for shells and notebooks that complete it."""
    own = signature(simulate).parameters
    defaults = {f.name: f.default for f in (*fields(Case), *fields(Noise))} | OPEN_BATCH
    hints = get_type_hints(Case) | get_type_hints(Noise)
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=hints[name], default=default)
        for name in _OPTIONS
        for default in [None if defaults[name] is MISSING else defaults[name]]
    ]
    *places, progress, _ = own.values()
    return Signature([*places, *options, progress], return_annotation=Result)


simulate.__signature__ = _keywords()  # type: ignore[attr-defined]
simulate.__doc__ = (simulate.__doc__ or "").replace(
    "        options: The",
    "".join(
        f"        {one.name}: {one.metadata['option'].help}\n"
        for one in (*fields(Case), *fields(Noise))
        if "option" in one.metadata
    )
    + "        noise: What makes ranks differ, as an object.\n        options: The",
)


def make_case(
    cluster: Reference | Cluster,
    model: Reference | Model,
    strategy: str | Strategy,
    **options: Unpack[Options],
) -> Case:
    """The case that the arguments of `simulate` describe; what they leave open is "auto"."""
    given: dict[str, Any] = {**options}
    unknown = [name for name in given if name not in _OPTIONS]
    if unknown:
        raise OptionError(f"unknown option {unknown[0]!r}; {nearest(unknown[0], _OPTIONS)}")
    uneven = {f.name: given.pop(f.name) for f in fields(Noise) if f.name in given}
    noise = _noise(uneven.pop("node_speed", None) or {}, uneven)
    if given.get("overrides", {}) is None:
        del given["overrides"]
    if noise != QUIET:
        if given.get("noise", QUIET) != QUIET:
            raise OptionError("give noise, or jitter, straggle, seed and node_speed, not both")
        given["noise"] = noise
    given = OPEN_BATCH | given | {"cluster": cluster, "model": model, "strategy": strategy}
    return Case(**given)


def _noise(node_speed: Any, others: Mapping[str, Any]) -> Noise:
    """Noise from values as users give them."""
    if not isinstance(node_speed, Mapping):
        raise OptionError(f"node_speed is {convert.shown(node_speed)}; it must map nodes to speeds")
    speeds = {
        convert.whole("node", node): convert.number(f"speed of node {node}", speed)
        for node, speed in node_speed.items()
    }
    return Noise(node_speed=speeds, **convert.declared(Noise, others))


def run(case: Case, *, progress: bool | None = False) -> Result:
    """Simulate and measure. `progress` as in `simulate`."""
    with progress_bar(_ROUNDS, shown=progress, after=_PATIENCE) as done:
        case, chosen = settled(case.inlined(), done)
        if case.pp > 1:
            result = _of_pipeline(case, done)
            return replace(result, notes=(*chosen, *result.notes))
        case, notes = _resolve_auto(case, done)
        notes = (*chosen, *notes)
        found = case_figures(case, done)
        prepared, result = found.prepared, found.whole
        cluster, nominal = prepared.cluster, result.round_time_s
        blocks = prepared.job.share.model.blocks
        remarks = remarks_on(cluster, prepared.job, blocks, case.noise, result.gpus, case.asked)
        host = offloaded(prepared.job, prepared.schedule, cluster.gpus_per_node)
        notes = (*notes, *_one_of_several_sites(case, cluster), *host, *remarks)
        result = replace(result, notes=(*notes, *_host_limits(result, cluster)))
        quiet = replace(case, noise=QUIET)
        if case.noise.uneven or cluster.node_spread or cluster.step_spread:
            nominal = case_figures(quiet, done, _even).result.round_time_s
            delay = metrics.straggler_delay(result.round_time_s, nominal)
            result = replace(result, straggler_delay_s=delay)

        def tried(strategy: Strategy) -> Seconds:
            """The step time, if it is in proportion to that of equal ranks."""
            other = case_figures(replace(quiet, strategy=strategy), done, _even)
            return result.step_time_s * other.result.round_time_s / nominal

        result = replace(result, notes=(*result.notes, *_one_site_alone(case, prepared, result)))
        warnings = warnings_of(prepared.strategy, [blocks], prepared.layout, result, tried)
        result = _with_interval(case, prepared, result, done)
    return replace(result, warnings=warnings)


def settled(case: Case, done: Done | None = None) -> tuple[Case, tuple[str, ...]]:
    """The case with numbers for the words of its batch and recomputation, and a line on each.

    Chosen among ranks that are equal, and for local updates by the steps between averages; see
    `prediction.batch`.
    """
    if not batch.is_open(case):
        return case, ()
    strategy = case.strategy
    quiet = replace(case, noise=QUIET, rounds=None, fold=True, interval="quick")
    parsed = parse(strategy) if isinstance(strategy, str) else strategy
    if case.pp == 1 and auto_delay.has_auto_options(parsed):
        one = replace(quiet, micro_batch=1, recompute="none", global_batch=None, accumulation=1)
        quiet = replace(quiet, strategy=_resolve_auto(one, done)[0].strategy)

    def speed(tried: Case) -> float:
        if tried.pp > 1:
            return pipeline.measured(tried, done).samples_per_s
        steps = _of_few_local_steps(tried)
        return case_figures(steps, done, _without_averages).whole.samples_per_s

    found, lines = batch.settled(quiet, speed)
    return replace(
        case,
        micro_batch=found.micro_batch,
        recompute=found.recompute,
        global_batch=found.global_batch,
        accumulation=found.accumulation,
    ), lines


def _of_few_local_steps(case: Case) -> Case:
    """The case with the shortest rounds that its strategy can have; others as they are."""
    strategy = parse(case.strategy) if isinstance(case.strategy, str) else case.strategy
    if type(strategy) not in STRATEGIES.values() or not isinstance(strategy, LocalSteps):
        return case
    options = ("tau", "delay", "fragments")
    short = {name: "1" for name in options if getattr(strategy, name, None)}
    return replace(case, strategy=with_options(strategy, short))


def _without_averages(prepared: LoadedCase) -> LoadedCase:
    bare = auto_delay.without_averages(prepared.schedule)
    return replace(prepared, schedule=bare)


def _even(prepared: LoadedCase) -> LoadedCase:
    """The case with equal nodes and steps."""
    return replace(prepared, cluster=replace(prepared.cluster, node_spread=0.0, step_spread=0.0))


def _of_pipeline(case: Case, done: Done | None) -> Result:
    """The result with its interval, which takes no further simulation, and its warnings."""
    result = pipeline.measured(case, done)
    cluster, model = case.load()
    first = case.stage(0, micro_steps=1)
    strategy = first.strategy
    found = Predicted(
        cluster=cluster.value,
        strategy=strategy,
        model=model.value,
        precision=str(first.precision),
        tokens_per_s=result.tokens_per_s,
        situation=_situation(first, model.value, result),
        again=lambda _: result.tokens_per_s,
    ).interval()

    def tried(other: Strategy) -> Seconds:
        return pipeline.measured(replace(case, strategy=other), done).step_time_s

    blocks = [job.share.model.blocks for job in case.stage_jobs()]
    split = case.uneven_split(len(model.value.blocks) - 2)
    return replace(
        result,
        **_ends(found, result, first.cluster),
        nearest_published=_nearest(found, first.cluster, model.value, result),
        notes=(
            *([split] if split else []),
            *offloaded(first.job, first.schedule, cluster.value.gpus_per_node),
            *remarks_on(
                first.cluster, first.job, sum(blocks, ()), case.noise, result.gpus, case.asked
            ),
            *_host_limits(result, first.cluster),
        ),
        warnings=warnings_of(strategy, blocks, first.layout, result, tried),
    )


def _one_of_several_sites(case: Case, sized: Cluster) -> tuple[str, ...]:
    """A remark where fewer GPUs than a cluster has are at one of its sites."""
    whole = case.load()[0].value
    if whole.sites == sized.sites:
        return ()
    count = counted(sized.layout.world_size, "GPU")
    smaller = f"--set nodes={sized.nodes}"
    return (f"{count} at one site, of {whole.sites}: no WAN is crossed; smaller sites: {smaller}",)


def _one_site_alone(case: Case, prepared: LoadedCase, result: Result) -> tuple[str, ...]:
    """A remark on what needs no WAN: the GPUs of one site, with the same global batch.

    Sites that are workers then take the steps that they take inside.
    """
    sites, strategy = prepared.cluster.sites, prepared.strategy
    if sites == 1 or case.noise != QUIET:
        return ()
    if isinstance(strategy, LocalSteps) and strategy.worker == "site":
        strategy = parse(strategy.inner or "zero2")
    alone = replace(
        case,
        strategy=strategy,
        gpus=result.gpus // sites,
        global_batch=result.global_batch,
        accumulation=None,
        micro_batch=AUTO,
    )
    try:
        found = case_figures(settled(alone)[0], None).whole
    except Co2simError:  # what a site cannot do alone is no alternative
        return ()
    who = f"one site alone, {counted(found.gpus, 'GPU')} with {found.strategy}"
    times = found.tokens_per_s / result.tokens_per_s
    text = f"{who}: {found.tokens_per_s:,.0f} {found.unit}s/s, {figures(times)} times as many"
    factors = [step_factor(one.strategy, scale_of(one), NO_GOAL) for one in (result, found)]
    if all(factors) and factors[0] != factors[1]:
        worth = times * factors[0].factor / factors[1].factor  # type: ignore[union-attr]
        text += f", and {figures(worth)} times as fast to the same loss"
    return (text,)


def _host_limits(result: Result, cluster: Cluster) -> tuple[str, ...]:
    """A remark where the host needs longer than kernels whose times are known."""
    return host_limits(result.host_load if cluster.gpu.kernels else None)


def _situation(prepared: LoadedCase, model: Model, result: Result) -> Situation:
    """What makes the result more or less sure."""
    own = setting_of(prepared.cluster, model, result, prepared.kernels)
    apart, misfit = from_measured(own, prepared.measured)
    gpu = prepared.cluster.gpu
    known = gpu.kernels is not None and (not gpu.stack or own.gpu in published_gpus())
    experts = model.active_parameters < model.parameters
    return Situation.of(result, known=known, apart=apart, misfit=misfit, experts=experts)


def _with_interval(case: Case, prepared: LoadedCase, result: Result, done: Done | None) -> Result:
    """The result with its interval; the schedule is the same on all clusters of one layout."""

    def again(cluster: Cluster) -> float:
        found = case_figures(case, done, lambda one: replace(one, cluster=cluster)).result
        return result.tokens_per_s * result.round_time_s / found.round_time_s

    found = Predicted(
        cluster=prepared.cluster,
        strategy=prepared.strategy,
        model=prepared.job.model,
        precision=str(prepared.precision),
        tokens_per_s=result.tokens_per_s,
        situation=_situation(prepared, prepared.job.model, result),
        again=again,
    ).interval(case.interval)
    near = _nearest(found, prepared.cluster, prepared.job.model, result)
    ends = _ends(found, result, prepared.cluster)
    return replace(result, **ends, nearest_published=near)


def _nearest(found: Interval, cluster: Cluster, model: Model, result: Result) -> float | None:
    """The distance of the nearest published run, if the interval is made of their errors."""
    if not found.by_runs:
        return None
    return nearest_to(setting_of(cluster, model, result), result)[0].distance


_CERTAIN = ("parameters", "gradients", "optimizer")
"""Items of memory that no run can do without."""


def _ends(found: Interval, result: Result, cluster: Cluster) -> dict[str, Any]:
    """The fields of a result that are ends of 90 % intervals; memory of processors has none."""
    ends: dict[str, Any] = {
        "tokens_per_s_low": found.low,
        "tokens_per_s_high": found.high,
        "interval_source": found.source,
    }
    errors = error_model().memory
    if errors is not None and cluster.backend == "nccl":
        items = result.memory_bytes_per_gpu
        size = items["total"]
        certain = sum(items.get(name, 0.0) for name in _CERTAIN)
        ends["memory_bytes_low"] = max(size * math.exp(-errors.reach), certain)
        ends["memory_bytes_high"] = size * math.exp(errors.reach)
    return ends


def trace(case: Case, *, progress: bool | None = False) -> tuple[Schedule, Trace]:
    """The schedule of a case and its simulated trace, warm-up included."""
    with progress_bar(_ROUNDS, shown=progress, after=_PATIENCE) as done:
        case, _ = _resolve_auto(settled(case, done)[0], done)
        prepared = case.prepare()
        simulator = Simulator(case.run_options, prepared, done)
        found = simulator.until_steady()[0]
        if found.rounds == 1:  # two show where one ends
            found = simulator.rounds(2)
        return prepared.schedule, found


def resolve_auto(case: Case) -> Case:
    """The case with numbers for "auto", chosen by simulation without noise."""
    return _resolve_auto(settled(case)[0], None)[0]


def _resolve_auto(case: Case, done: Done | None) -> tuple[Case, tuple[str, ...]]:
    """The case with numbers for "auto", and a line on each."""
    strategy = case.strategy
    if isinstance(strategy, str):
        strategy = strategies.parse(strategy)
    if not isinstance(strategy, CO2) or not auto_delay.has_auto_options(strategy):
        return case, ()
    quiet = replace(case, noise=QUIET, rounds=None, fold=True)

    def time_of(tried: Strategy, averages: bool) -> Seconds:  # noqa: FBT001
        def change(prepared: LoadedCase) -> LoadedCase:
            # neither waiting for slower nodes nor computing more slowly beside an average is
            # waiting for the average: no longer round would hide it
            even = _even(prepared)
            even = replace(even, cluster=replace(even.cluster, interference=0.0))
            return even if averages else _without_averages(even)

        return case_figures(replace(quiet, strategy=tried), done, change).result.round_time_s

    chosen, notes = auto_delay.resolve(strategy, time_of)
    if case.noise != QUIET:
        notes = tuple(f"{note} (without jitter, stragglers and speeds of nodes)" for note in notes)
    return replace(case, strategy=chosen), notes
