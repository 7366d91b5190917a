"""Published runs predicted from one run of their series, as `co2sim calibrate` does it.

A series is what differs in the number of GPUs only, or in its batch: runs of a source with one
stack, model, cluster, strategy, and one way to divide layers. The stack is calibrated by the run on
the fewest GPUs, from what was fitted without the source; the others are then predicted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from joblib import Parallel, delayed

from analysis.published import stack_fit
from analysis.published.runs import TrainingRun
from analysis.published.stack_fit import Values
from co2sim.common.errors import CatalogError
from co2sim.models.stack import Setting
from co2sim.prediction.case import Case
from co2sim.prediction.evidence import distance, setting_of
from co2sim.prediction.result import Result
from co2sim.studies.batch import Failure, outcome_of
from co2sim.studies.calibration import calibrate, moved
from co2sim.studies.measured_runs import MeasuredRun

_OF_STACKS = {
    "gpu.products.sustained": "stack.sustained",
    "inter.ring_loss": "stack.ring_loss",
    "interference": "stack.interference",
    "node_spread": "stack.node_spread",
}
"""Numbers that a calibrated stack has of a cluster, in place of what a run would override."""


@dataclass(frozen=True, slots=True)
class Further:
    """A run whose `result` was predicted by the stack that `start` calibrated, so far `apart`."""

    run: TrainingRun
    start: TrainingRun
    result: Result
    apart: float


def series(runs: Iterable[TrainingRun]) -> list[list[TrainingRun]]:
    """Runs on more than one number of GPUs, those on the fewest first."""
    found: dict[tuple[object, ...], list[TrainingRun]] = {}
    for run in runs:
        name = run.strategy.partition(":")[0]
        key = run.paper, run.stack, run.model, run.cluster, name, run.tp, run.pp
        found.setdefault(key, []).append(run)
    ordered = [sorted(some, key=lambda run: run.gpus) for some in found.values()]
    return [some for some in ordered if some[0].gpus < some[-1].gpus]


def further_runs(
    runs: Sequence[TrainingRun], left_out: Mapping[str, Values], jobs: int
) -> list[Further]:
    """All larger runs of all series, each predicted from the first of its series.

    `left_out` are the fitted values without each source.
    """
    found = Parallel(n_jobs=jobs)(
        delayed(_further)(some, left_out[some[0].paper]) for some in series(runs)
    )
    return [one for some in found for one in some]


def _further(some: Sequence[TrainingRun], values: Values) -> list[Further]:
    start = some[0]
    assert start.tokens_per_s_per_gpu is not None  # of headline runs
    case = _case(start, values)
    measured = MeasuredRun(f"{start.paper} {start.id}", case, start.tokens_per_s_per_gpu)
    found = calibrate([measured], progress=False)
    here = _setting(case, found.last[0])
    made = []
    for run in some:
        if run.gpus > start.gpus:
            case = moved(_case(run, values), found.values)
            result = _result(case)
            made.append(Further(run, start, result, distance(here, _setting(case, result))))
    return made


def _case(run: TrainingRun, values: Values) -> Case:
    """With values as numbers of the stack; recomputation that no source states is what fits."""
    stated = stack_fit.overrides(run, values)
    extra = {_OF_STACKS.get(path, path): text for path, text in stated.items()}
    case = run.case(extra)
    if run.recompute == "auto" and not _result(case).fits_in_memory:
        case = run.case(extra, recompute="full")
    return case


def _result(case: Case) -> Result:
    outcome = outcome_of(case)
    if isinstance(outcome, Failure):
        raise CatalogError(f"{outcome.case}: {outcome.reason}")
    return outcome


def _setting(case: Case, result: Result) -> Setting:
    cluster, model = case.load()
    return setting_of(cluster.value, model.value, result, case.job().kernels)
