"""Published numbers predicted by simulation: cells, and training runs.

What is computed of a configuration is a function of its `RunSetup`, and kept in a cache of bounded
size: fits and derivatives ask for the same schedules with other constants.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from analysis.published.cells import Cell, with_constants
from analysis.published.runs import RunSetup
from co2sim.common.errors import CatalogError
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import driver
from co2sim.prediction.case import Case
from co2sim.prediction.job import Stage
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Collective, Compute, Kind, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.costs import cost_of
from co2sim.simulation.lowering import alone
from co2sim.simulation.run import execute, expected_slowdown
from co2sim.strategies import parse
from co2sim.studies.batch import Failure, run_all

_MANY_RESULTS = 2048
"""Results that are kept: those of all published cells, several times over."""

_MANY_TIMES = 8192
"""Step times that are kept: a number each."""

_MANY_SCHEDULES = 2048
"""Schedules that are kept: those of all published cells, several times over."""

_FEW, _MORE = 2, 3
"""Layers, and micro-steps, of the runs from which a longer one is extrapolated."""


_ONE_BUCKET = parse("ddp:bucket_mib=1000000")
"""Gradients in one buffer, reduced after the last backward pass, as Megatron-LM does it."""

# --- results -------------------------------------------------------------------------------------


def simulated(
    cases: Sequence[Case], jobs: int, what: str, *, progress: bool | None = None
) -> list[Result]:
    """The results of cases, of which each must have one: else the error of the first without."""
    results = []
    for outcome in run_all(cases, jobs, what=what, progress=progress):
        if isinstance(outcome, Failure):
            raise CatalogError(f"{outcome.case}: {outcome.reason}")
        results.append(outcome)
    return results


_RESULTS: dict[RunSetup, Result] = {}


def prepare(runs: Iterable[RunSetup], jobs: int = -1) -> None:
    """Simulate what is not known yet, in processes; see `co2sim.studies.batch.run_all`."""
    new = [run for run in dict.fromkeys(runs) if run not in _RESULTS]
    if len(_RESULTS) + len(new) > _MANY_RESULTS:
        _RESULTS.clear()
    cases = [run.case() for run in new]
    _RESULTS.update(zip(new, simulated(cases, jobs, "predicting published runs"), strict=True))


def result_of(run: RunSetup) -> Result:
    """The result of a run, as `co2sim run` has it."""
    if run not in _RESULTS:
        prepare([run], 1)
    return _RESULTS[run]


# --- cells ---------------------------------------------------------------------------------------


def predict(cell: Cell, values: Mapping[str, float] | None = None, *, fast: bool = False) -> float:
    """What the simulator gives for a cell; `values` replace constants of its group.

    `fast` is for fits and derivatives. It sums a schedule without overlap, and extrapolates from
    few layers to many; both agree with the whole simulation to a hundredth of a percent, which a
    test holds.
    """
    if values:
        cell = with_constants(cell, values)
    step_time = quick_step_time if fast else _whole_step_time
    quantities = [_value(cell, run, step_time) for run in cell.runs]
    if not cell.over:
        return quantities[0]
    others = (_value(cell, run, step_time) for run in cell.over)
    ratios = [above / below for above, below in zip(quantities, others, strict=True)]
    return max(ratios) if cell.pick == "max" else min(ratios)


def _whole_step_time(run: RunSetup) -> Seconds:
    return result_of(run).step_time_s


def _value(cell: Cell, run: RunSetup, step_time: Callable[[RunSetup], Seconds]) -> float:
    """The cell's quantity of a run; of a ratio tokens per second are per GPU."""
    if cell.quantity == "inter_node_volume":
        return _volume(run, cell.part)
    step = step_time(run)
    if cell.quantity == "iteration_ms":
        return step * 1e3
    samples = run.micro_batch * run.accumulation / step
    if cell.quantity == "tokens_per_s":
        return samples * run.trained().tokens * (1 if cell.over else run.gpus)
    return samples * _prepared(_plain(run)).workload.hardware_flops_per_sample / 1e12


def _volume(setup: RunSetup, part: str) -> float:
    """What a node sends to others in a step, as a multiple of the model in its training type.

    `part` is `total`, or one of those that `_part` names. Scales are not counted.
    """
    prepared, cluster = _prepared(_plain(setup)), setup.used_cluster()
    sent = sum(
        cost_of(replace(op.work, scale_block=0), cluster).bytes_per_link(cluster)[1]
        for op in prepared.schedule.body
        if isinstance(op.work, Collective) and part in {"total", _part(op.name, op.work)}
    )
    return sent / (prepared.workload.parameters * prepared.workload.precision.bytes)


def _part(name: str, work: Collective) -> str:
    """The part of a step of ZeRO-3 that a collective belongs to."""
    if work.kind != Kind.ALL_GATHER:
        return "gradient_reduce_scatter"
    return "forward_all_gather" if ".forward." in name else "backward_all_gather"


# --- short ways for fits -------------------------------------------------------------------------


@lru_cache(_MANY_TIMES)
def quick_step_time(setup: RunSetup) -> Seconds:
    """The same by a shorter way where there is one: without overlap, and for equal layers."""
    if setup.pp > 1:
        return _whole_step_time(setup)
    if _is_serial(setup):
        return _serial_step_time(setup)
    if setup.parsed().name in {"zero3", "zeropp", "fsdp"}:
        return _extrapolated_step_time(setup)
    schedule, trace = driver.trace(setup.case())
    return metrics.window(trace, schedule, 1).round_time / schedule.steps


def _extrapolated_step_time(setup: RunSetup) -> Seconds:
    """From shorter models and steps: each of many equal layers, or micro-steps, adds as much."""
    layers = len(setup.trained().blocks) - 2
    cluster = setup.used_cluster()

    def with_all_layers(micro_steps: int) -> Seconds:
        few, more = (_simulated(setup, cluster, count, micro_steps) for count in (_FEW, _MORE))
        return few + (more - few) * (layers - _FEW)

    if setup.accumulation <= _MORE:
        return with_all_layers(setup.accumulation)
    few, more = (with_all_layers(count) for count in (_FEW, _MORE))
    return few + (more - few) * (setup.accumulation - _FEW)


def _simulated(setup: RunSetup, cluster: Cluster, layers: int, micro_steps: int) -> Seconds:
    """A round of a smaller run."""
    schedule = _shorter(_plain(setup), layers, micro_steps)
    precision = setup.precision
    slowdown = expected_slowdown(schedule, cluster, precision=precision)
    trace = execute(schedule, cluster, precision=precision, rounds=2, slowdown=slowdown)
    return metrics.window(trace, schedule, 1).round_time


@lru_cache(_MANY_SCHEDULES)
def _shorter(stated: RunSetup, layers: int, micro_steps: int) -> Schedule:
    """The schedule of a smaller run: it does not depend on the fitted constants."""
    shape = {**stated.overrides, "model.layers": str(layers)}
    return stated.changed(overrides=shape, accumulation=micro_steps).case().stage().schedule


@lru_cache(_MANY_SCHEDULES)
def _prepared(stated: RunSetup) -> Stage:
    """Job and schedule, which do not depend on the fitted constants either."""
    return stated.case().stage()


def _plain(setup: RunSetup) -> RunSetup:
    """What job and schedule depend on: no constants, and no numbers of a cluster of this layout."""
    return _of_layout(setup.changed(constants=()))


@lru_cache(_MANY_SCHEDULES)
def _of_layout(stated: RunSetup) -> RunSetup:
    of_model = {k: v for k, v in stated.overrides.items() if k.startswith("model.")}
    plain = stated.changed(overrides=of_model)
    one, other = stated.used_cluster(), plain.used_cluster()
    same = one.layout == other.layout and one.gpu.peak == other.gpu.peak
    return plain if same else stated


def _is_serial(setup: RunSetup) -> bool:
    """Whether nothing overlaps: one bucket, which closes when the backward pass has ended."""
    return setup.parsed() == _ONE_BUCKET


@lru_cache(_MANY_SCHEDULES)
def _works(stated: RunSetup) -> list[tuple[Compute | Collective, int]]:
    """Different works of a schedule, and how often each runs."""
    counted: dict[Compute | Collective, int] = {}
    for op in stated.case().stage().schedule.body:
        counted[op.work] = counted.get(op.work, 0) + 1
    return list(counted.items())


def _serial_step_time(setup: RunSetup) -> Seconds:
    """The sum of all works, each alone."""
    cluster = setup.used_cluster()
    return sum(
        count * _alone(work, cluster, setup.precision) for work, count in _works(_plain(setup))
    )


def _alone(work: Compute | Collective, cluster: Cluster, precision: str) -> Seconds:
    if isinstance(work, Compute):
        return alone(work, cluster, precision, free=False)
    return cost_of(work, cluster).duration_alone(cluster)
