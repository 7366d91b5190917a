"""Errors on published training runs: the model of them, and what the catalog says of both."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize

from analysis.published.cells import cell_of_run
from analysis.published.predict import CellPrediction, ErrorSummary, simulated, summarized
from analysis.published.runs import PAPERS, RunSetup, TrainingRun
from analysis.published.stack_fit import (
    SHARED,
    UNKNOWN,
    Shared,
    Values,
    generation,
    log_errors,
    overrides,
    predictions,
    setting_in,
    toml_record,
)
from co2sim.catalog import load_stack, names
from co2sim.common import files
from co2sim.common.errors import OptionError
from co2sim.prediction.evidence import EVIDENCE, PublishedRun
from co2sim.prediction.intervals import (
    ERRORS,
    KIND_WORDS,
    ErrorModel,
    KindErrors,
    MemoryErrors,
    ScalingErrors,
    SourceErrors,
    StackMemory,
    distance,
    error_model,
    parts_of,
    read_error_model,
)
from co2sim.prediction.likeness import traits_of
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.studies.calibration import calibrate, moved
from co2sim.studies.measured_runs import MeasuredRun
from co2sim.training.framework import recomputation
from co2sim.training.memory import GIB, reserved
from co2sim.training.stack import Setting

INTERVALS = "run_intervals.toml"
"""The file of `papers/` with the model of errors without each source."""

_LEVEL = 0.9
_FREEDOM = 5.0
"""Degrees of freedom of Student's t: a few runs are far off."""
_LEAST = 0.03
"""Of the deviation that any run has: published numbers are no surer."""
_LEAST_OF_STRANGE = 0.23
"""Of the deviation of a GPU of which no run is published. Eight trainings on four accelerators that
are in no fit were predicted (docs/validation.md): the root of the mean square of the logarithms is
0.26, of which any site and any run have 0.12."""
_USUAL, _PULL = 0.1, 0.1
"""Of a deviation of which runs say nothing, and what a logarithm weighs that differs from it."""
_FAR = 5.0
"""Of a logarithm: no throughput differs by as much between stacks."""
_LEAST_OF_RATIO = 0.01
"""The same of ratios within a source: utilizations are published with two digits."""
_CATALOG = resources.files("co2sim.catalog")


# --- series: runs predicted from one of them ------------------------------------------------------
#
# A series is what differs in the number of GPUs only, or in its batch: runs of a source with one
# stack, model, cluster, strategy, and one way to divide layers. The stack is calibrated by the run
# on the fewest GPUs, from what was fitted without the source; the others are then predicted.

_OF_STACKS = {
    "gpu.products.sustained": "stack.sustained",
    "inter.ring_loss": "stack.ring_loss",
    "interference": "stack.interference",
    "node_spread": "stack.node_spread",
}
"""Numbers that a calibrated stack has of a cluster, in place of what a run would override."""


@dataclass(frozen=True, slots=True)
class Further:
    """A run whose `result` was predicted by the stack that a run of the site calibrated.

    That was like `start`.
    """

    run: TrainingRun
    start: Setting
    result: Result


def series(runs: Iterable[TrainingRun]) -> list[list[TrainingRun]]:
    """Runs on more than one number of GPUs, those on the fewest first."""
    groups: dict[tuple[object, ...], list[TrainingRun]] = {}
    for run in runs:
        name = run.strategy.partition(":")[0]
        key = run.paper, run.stack, run.model, run.cluster, name, run.tp, run.pp
        groups.setdefault(key, []).append(run)
    ordered = [sorted(some, key=lambda run: run.gpus) for some in groups.values()]
    return [some for some in ordered if some[0].gpus < some[-1].gpus]


def further_runs(
    runs: Sequence[TrainingRun], left_out: Mapping[str, Values], jobs: int
) -> list[Further]:
    """All larger runs of all series, each predicted from the first of its series.

    `left_out` are the fitted values without each source.
    """
    by_series = Parallel(n_jobs=jobs)(
        delayed(_further)(some, left_out[some[0].site]) for some in series(runs)
    )
    return [further for some in by_series for further in some]


def _further(some: Sequence[TrainingRun], values: Values) -> list[Further]:
    start = some[0]
    assert start.tokens_per_s_per_gpu is not None  # of headline runs
    case = _case(start, values)
    measured = MeasuredRun(f"{start.paper} {start.id}", case, start.tokens_per_s_per_gpu)
    try:
        calibrated = calibrate([measured], progress=False)
    except OptionError:  # of long attention no number of a stack changes the speed
        return []
    here = setting_in(case, calibrated.last[0])
    made = []
    for run in some:
        if run.gpus > start.gpus:
            case = moved(_case(run, values), calibrated.values)
            result = _result(case)
            made.append(Further(run, here, result))
    return made


def _case(run: TrainingRun, values: Values) -> Question:
    """With values as numbers of the stack; recomputation that no source states is what fits."""
    stated = overrides(run, values)
    extra = {_OF_STACKS.get(path, path): text for path, text in stated.items()}
    case = run.case(extra)
    if run.recompute == "auto" and not _result(case).fits_in_memory:
        case = run.case(extra, recompute="full")
    return case


def _result(case: Question) -> Result:
    (result,) = simulated([case], 1, "predicting a run", progress=False)
    return result


# --- memory --------------------------------------------------------------------------------------
#
# The peak follows from formulas (`co2sim.training.memory`). No number is fitted to these runs, but
# a setting of one stack was inferred from them (docs/stacks.md). Runs that need what is not
# modelled do not count.

_HARMLESS = {"fp8", "torch.compile", "selective activation checkpointing", "async TP"}
"""What runs need that changes their speed, but hardly their memory."""


def run_memories(
    runs: Sequence[TrainingRun], jobs: int
) -> list[tuple[TrainingRun, CellPrediction]]:
    """Peaks of the published kind, in GiB: of runs that can be expressed but for `_HARMLESS`."""
    some = [run for run in runs if run.memory_gib is not None and _expressed(run)]
    return [
        (run, CellPrediction(cell_of_run(run, "memory_gib"), _peak(result, run.memory_kind) / GIB))
        for run, result in zip(some, _simulated(some, jobs), strict=True)
    ]


def memory_bounds(runs: Sequence[TrainingRun], jobs: int) -> list[CellPrediction]:
    """Runs that show that a prediction is wrong, though their peak of memory is not published.

    They ran with less than they were predicted to need, or ran out of memory with more: their error
    is at least what lies between the memory of the GPU, which stands for the peak, and that.
    """
    some = [run for run in runs if run.memory_gib is None and _expressed(run)]
    rows = []
    for run, result in zip(some, _simulated(some, jobs), strict=True):
        if result.fits_in_memory == run.out_of_memory:
            room = result.gpu_memory_bytes / GIB
            cell = cell_of_run(run.changed(memory_gib=room), "memory_gib")
            rows.append(CellPrediction(cell, result.memory_bytes_per_gpu["total"] / GIB))
    return rows


def _expressed(run: TrainingRun) -> bool:
    return bool(run.cluster) and _HARMLESS.issuperset(run.needs)


def _simulated(runs: Sequence[TrainingRun], jobs: int) -> list[Result]:
    """As in bf16 where a run was in fp8."""
    plain = [run.changed(precision="bf16") if run.precision == "fp8" else run for run in runs]
    return predictions(plain, [None] * len(plain), jobs, "predicting memory") if plain else []


def _peak(result: Result, kind: str) -> float:
    memory = result.memory_bytes_per_gpu
    if kind == "allocated":
        return result.allocated_bytes_per_gpu
    return reserved(memory) if kind == "reserved" else memory["total"]


_LEAST_OF_MEMORY = 0.2
"""How far an interval of memory reaches at least.

Peaks here were known when what stacks hold was read in their code, so their errors say too little.
Of 80 further runs of four sources, with peaks that PyTorch counts, none is further off: SimuMax's
on B200 (mean error 4 %), zero-bubble's on A100 (7 %), torchao's on MI300X and H100 (5 %).
"""

_LEAST_OF_UNKNOWN = 0.38
"""The same for a stack without peaks here: nine tenths of 167 further runs of eight sources, with
totals of nvidia-smi and stacks that are none of the catalog, where every source weighs as much."""

_OF_OTHERS = 1.0
"""What runs of all stacks weigh, together, beside those of a stack: as much as one run of it."""


def memory_errors(rows: Sequence[CellPrediction], bounds: Sequence[CellPrediction]) -> MemoryErrors:
    """Of all runs, and of each stack; and how many lie in intervals without their source."""
    summary = ErrorSummary.of(rows)
    inside = 0
    for source in {row.cell.source for row in rows}:
        others, other_bounds = (
            [row for row in some if row.cell.source != source] for some in (rows, bounds)
        )
        reach, stacks = memory_reaches(others, other_bounds)
        for row in rows:
            if row.cell.source == source:
                of_stack = stacks.get(_stack_name(row))
                inside += _memory_error(row) <= (of_stack.reach if of_stack else reach)
    reach, stacks = memory_reaches(rows, bounds)
    return MemoryErrors(
        reach=reach,
        mean=round(summary.mape, 4),
        bias=round(summary.median_bias, 4),
        runs=len(rows),
        sources=len({row.cell.source for row in rows}),
        inside=round(inside / len(rows), 4),
        stacks=stacks,
    )


def memory_reaches(
    rows: Sequence[CellPrediction], bounds: Sequence[CellPrediction] = ()
) -> tuple[float, dict[str, StackMemory]]:
    """How far 90 % intervals reach: of a stack without published runs, and of those with some.

    A new stack is most like a new source: where it has no runs, every source weighs as much.
    Of a stack, all runs of a source together weigh as the root of their number, `bounds` of it
    included, and those of all stacks as one run more: few runs say little.
    """
    errors = np.array([_memory_error(row) for row in rows])
    sources = [row.cell.source for row in rows]
    each = np.array([1 / sources.count(source) for source in sources])
    stacks = {}
    for name in sorted({_stack_name(row) for row in (*rows, *bounds)}):
        own, more = ([row for row in some if _stack_name(row) == name] for some in (rows, bounds))
        of_stack = [row.cell.source for row in (*own, *more)]
        of_own = [_memory_error(row) for row in (*own, *more)]
        weight = np.concatenate([each * _OF_OTHERS / each.sum(), weights(of_stack)])
        stacks[name] = StackMemory(
            reach=max(
                _LEAST_OF_MEMORY if own else _LEAST_OF_UNKNOWN,
                _reach(np.concatenate([errors, of_own]), weight),
            ),
            runs=len(own),
            bounds=len(more),
            sources=len(set(of_stack)),
        )
    return max(_LEAST_OF_UNKNOWN, _reach(errors, each)), stacks


def _reach(errors: NDArray[np.float64], weight: NDArray[np.float64]) -> float:
    """With four digits behind the point, rounded up: what just reached an error still does."""
    return math.ceil(quantile(errors, weight) * 1e4) / 1e4


def _memory_error(row: CellPrediction) -> float:
    """The size of log(published / predicted)."""
    return abs(math.log(row.predicted / row.cell.published))


def _stack_name(row: CellPrediction) -> str:
    return load_stack(row.cell.setup.stack).value.name


# --- models of errors ----------------------------------------------------------------------------


def weights(sources: Sequence[str]) -> NDArray[np.float64]:
    """Of runs of sources: all of a source together weigh as the root of their number."""
    return np.array([sources.count(source) ** -0.5 for source in sources])


@dataclass(frozen=True, slots=True)
class Left:
    """A run beside a prediction that does not know its site: what it is like, and log errors."""

    run: TrainingRun
    result: Result
    setting: Setting
    error: float


def left(
    runs: Sequence[TrainingRun], results: Sequence[Result], every: Sequence[TrainingRun] = ()
) -> list[Left]:
    """Runs with results without their site.

    Of a GPU that no other site of `every` run (empty: of these) has nothing is known.
    """
    sites: dict[str, set[str]] = {}
    for run in every or runs:
        sites.setdefault(generation(run), set()).add(run.site)
    rows = []
    for run, result, error in zip(runs, results, log_errors(runs, results), strict=True):
        setting = setting_in(run.case(), result)
        strange = sites[setting.gpu] == {run.site} if setting.gpu in sites else True
        rows.append(Left(run, result, replace(setting, strange=strange), float(error)))
    return rows


def errors_of(rows: Sequence[Left]) -> ErrorModel:
    """The model of the errors of results that were predicted without their site."""
    runs, results = [row.run for row in rows], [row.result for row in rows]
    return replace(
        likeliest(rows),
        sources=tuple(_sources(runs, results)),
        kinds=dict(_kinds(rows)),
        scaling=scaling_errors(runs, results),
    )


def _kinds(rows: Sequence[Left]) -> Iterator[tuple[str, KindErrors]]:
    for name in KIND_WORDS:
        some = [row for row in rows if parts_of(row.setting)[name]]
        if some:
            mean = math.fsum(abs(math.expm1(row.error)) for row in some) / len(some)
            sites = len({row.run.site for row in some})
            yield name, KindErrors(runs=len(some), sites=sites, mean=round(mean, 4))


def likeliest(rows: Sequence[Left]) -> ErrorModel:
    """The deviations that make the errors of all sites most likely, and how far intervals reach.

    Errors of a site are of a multivariate t distribution with the covariance of the model. An
    interval reaches as far as nine tenths of the errors lie, in their own deviations.
    """
    sites = [
        _Site.of([row for row in rows if row.run.site == site])
        for site in sorted({row.run.site for row in rows})
    ]
    names = list(parts_of(rows[0].setting))

    def loss(logs: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        variances, off = np.exp(2 * logs), logs - math.log(_USUAL)
        losses, slopes = zip(*(site.loss(variances) for site in sites), strict=True)
        total = math.fsum(losses) + _PULL * float(off @ off)
        return total, 2 * (np.sum(slopes, axis=0) * variances + _PULL * off)

    start = np.full(len(names) + 2, math.log(_USUAL))
    least = [math.log(_LEAST)] * 2
    least += [math.log(_LEAST_OF_STRANGE) if name == "strange" else -5.0 for name in names]
    bounds = [(low, 0.0) for low in least]
    best = minimize(loss, start, jac=True, bounds=bounds)
    own, near, *shared = (_rounded(float(value)) for value in np.exp(best.x))
    model = ErrorModel(dict(zip(names, shared, strict=True)), near, own, 1.0)
    scaled = np.array([abs(row.error) / model.reach(row.setting) for row in rows])
    weight = weights([row.run.site for row in rows])
    return replace(model, factor=_rounded(quantile(scaled, weight)))


def spread_between(rows: Sequence[Left], model: ErrorModel) -> float:
    """The `spread` that a stack needs so that nine tenths of these errors are in its intervals."""
    weight = weights([row.run.site for row in rows])
    errors = np.array([row.error for row in rows])
    variances = np.array([model.variance(replace(row.setting, spread=0.0)) for row in rows])

    def beyond(spread: float) -> float:
        return quantile(np.abs(errors) / np.sqrt(variances + spread**2), weight) - model.factor

    return _rounded(brentq(beyond, 0.0, _FAR)) if beyond(0.0) > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Site:
    """Errors of the runs of a site, with what their covariance is made of."""

    errors: NDArray[np.float64]
    matrices: NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[Left]) -> "_Site":
        settings = [row.setting for row in rows]
        apart = [[distance(here, there) for there in settings] for here in settings]
        parts = np.array([[*parts_of(setting).values()] for setting in settings]).T
        # Distances skip what one run does not state, so that few eigenvalues may be below 0.
        values, vectors = np.linalg.eigh(np.exp(-np.array(apart)))
        own, near = np.eye(len(rows)), (vectors * np.maximum(values, 0.0)) @ vectors.T
        shared = [np.outer(part, part) for part in parts]
        return cls(np.array([row.error for row in rows]), np.array([own, near, *shared]))

    def loss(self, variances: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Less the logarithm of its likelihood, and how it changes with each variance."""
        covariance = np.tensordot(variances, self.matrices, 1)
        inverse, count = np.linalg.inv(covariance), len(self.errors)
        scaled = inverse @ self.errors
        far, freedom = float(scaled @ self.errors), _FREEDOM + count
        logs = np.linalg.slogdet(covariance).logabsdet
        whole = (logs + freedom * math.log1p(far / _FREEDOM)) / 2
        outer = freedom / (_FREEDOM + far) * np.outer(scaled, scaled)
        return float(whole), np.tensordot(self.matrices, inverse - outer, 2) / 2


@dataclass(frozen=True, slots=True)
class Scaling:
    """Throughput per GPU of a published job on `nodes`, relative to the same job on fewer GPUs.

    A 90 % interval of the prediction reaches from `low` to `high`, by the errors of other sources.
    """

    source: str
    site: str
    nodes: int
    published: float
    predicted: float
    low: float = math.nan
    high: float = math.nan

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.published - 1


def scalings(runs: Sequence[TrainingRun], results: Sequence[Result]) -> list[Scaling]:
    """All pairs of runs of a source that differ in nothing but GPUs and micro-steps."""
    jobs: dict[tuple[object, ...], list[tuple[TrainingRun, Result]]] = {}
    for run, result in zip(runs, results, strict=True):
        key = *_place(run), run.changed(gpus=1, accumulation=1).model_dump_json(include=_SETUP)
        jobs.setdefault(key, []).append((run, result))
    pairs: list[Scaling] = []
    for some in jobs.values():
        some.sort(key=lambda pair: pair[0].gpus)
        for (first, one), (second, other) in combinations(some, 2):
            if first.gpus < second.gpus:
                assert first.tokens_per_s_per_gpu  # of headline runs
                assert second.tokens_per_s_per_gpu
                published = second.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu
                predicted = other.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu
                pairs.append(Scaling(first.paper, first.site, other.nodes, published, predicted))
    return pairs


_SETUP = set(RunSetup.model_fields)
"""What makes two published runs the same job."""


def scaling_errors(runs: Sequence[TrainingRun], results: Sequence[Result]) -> ScalingErrors | None:
    """How errors of such ratios grow with what is lost; None where there is no such pair.

    All pairs of a source together weigh as the root of its runs.
    """
    pairs = scalings(runs, results)
    if not pairs:
        return None
    errors = np.array([math.log(pair.predicted / pair.published) for pair in pairs])
    weight = _pair_weights(runs, [pair.source for pair in pairs])
    parts = [ScalingErrors.parts(pair.predicted, pair.nodes) for pair in pairs]
    deviations, factor = _lossy(parts, errors, weight)
    return ScalingErrors(**deviations, factor=factor, runs=len(pairs))


def compared_scalings(
    runs: Sequence[TrainingRun], results: Sequence[Result], folder: Path = PAPERS
) -> list[Scaling]:
    """Published ratios beside predicted ones, with intervals that do not know their source."""
    models = recorded_models(folder)
    rows = []
    for pair in scalings(runs, results):
        errors = (models.get(pair.site) or error_model()).scaling
        assert errors  # of several sources
        low, high = errors.ends(pair.predicted, pair.nodes)
        rows.append(replace(pair, low=low, high=high))
    return rows


def _pair_weights(runs: Sequence[TrainingRun], papers: Sequence[str]) -> NDArray[np.float64]:
    """Of pairs: all of a source together weigh as the root of its runs."""
    counts, pairs = Counter(run.paper for run in runs), Counter(papers)
    return np.array([counts[paper] ** 0.5 / pairs[paper] for paper in papers])


def _place(run: TrainingRun) -> tuple[str, ...]:
    gpu = run.overrides.get("gpu", "")
    return run.paper, run.stack, run.model, run.cluster, gpu


def _lossy(
    parts: Sequence[Mapping[str, float]],
    errors: NDArray[np.float64],
    weight: NDArray[np.float64],
) -> tuple[dict[str, float], float]:
    """Standard deviations of the parts of independent errors, and how far intervals reach.

    Deviations maximize the likelihood of Student's t; the first one is at least `_LEAST_OF_RATIO`.
    """
    keys = list(parts[0])
    sizes = np.array([[part[key] for key in keys] for part in parts])

    def deviations(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.sqrt((sizes**2) @ np.exp(2 * logs)))

    def loss(logs: NDArray[np.float64]) -> float:
        sigma = deviations(logs)
        scaled = 1 + (errors / sigma) ** 2 / _FREEDOM
        of_runs = np.log(sigma) + (_FREEDOM + 1) / 2 * np.log(scaled)
        return float(weight @ of_runs + 0.02 * np.sum((logs - math.log(_LEAST)) ** 2))

    start = np.full(len(keys), math.log(0.1))
    bounds = [(math.log(_LEAST_OF_RATIO), 1.0), *[(-7.0, 1.0)] * (len(keys) - 1)]
    best = minimize(loss, start, bounds=bounds)
    factor = quantile(np.abs(errors) / deviations(best.x), weight)
    return dict(zip(keys, map(_rounded, np.exp(best.x)), strict=True)), _rounded(factor)


def _rounded(value: float) -> float:
    """With four digits."""
    return float(f"{value:.4g}")


def models_without(rows: Sequence[Left]) -> dict[str, ErrorModel]:
    """For each site the model of the errors of all others: its intervals do not know it."""
    return {
        site: errors_of([row for row in rows if row.run.site != site])
        for site in sorted({row.run.site for row in rows})
    }


def _entry(model: ErrorModel) -> dict[str, Any]:
    """A model of errors, as records have it."""
    scaling = {"scaling": asdict(model.scaling)} if model.scaling else {}
    numbers = {"factor": model.factor, "own": model.own, "near": model.near}
    return numbers | {"shared": dict(model.shared)} | scaling


def models_file(models: Mapping[str, ErrorModel], folder: Path = PAPERS) -> tuple[Path, bytes]:
    """The record of `models_without`."""
    text = toml_record(
        "Written by `co2analysis runs --fit`: the model of errors without each source, by which\n"
        "the coverage of its 90 % intervals is judged; see co2sim.prediction.intervals.",
        {source: _entry(model) for source, model in models.items()},
    )
    return folder / INTERVALS, text.encode()


def recorded_models(folder: Path = PAPERS) -> dict[str, ErrorModel]:
    """What `models_file` wrote, by source. Raises CatalogError where there is none."""
    entries = files.toml_file(folder / INTERVALS).items()
    return {source: read_error_model(entry) for source, entry in entries}


def quantile(values: NDArray[np.float64], weight: NDArray[np.float64]) -> float:
    """The value below which nine tenths of the weight lie."""
    return float(np.quantile(values, _LEVEL, weights=weight, method="inverted_cdf"))


def compared(
    rows: Sequence[Left],
    folder: Path = PAPERS,
    measured: Sequence[Sequence[Setting]] = (),
) -> list[CellPrediction]:
    """Speeds of runs beside their results; intervals are by the errors of all other sites.

    `measured` are the runs that the stack of each was calibrated by.
    """
    models = recorded_models(folder)
    made = []
    for row, known in zip(rows, measured or [()] * len(rows), strict=True):
        model = models.get(row.run.site) or error_model()
        reach = model.reach(row.setting, known)
        speed = row.result.tokens_per_s_per_gpu
        ends = speed * math.exp(-reach), speed * math.exp(reach)
        made.append(CellPrediction(cell_of_run(row.run, "tokens_per_s_per_gpu"), speed, *ends))
    return made


# --- beside baselines ----------------------------------------------------------------------------

_HALF = 0.5
"""Of the peak: what a user may assume who asks no simulator."""

DENSE = "dense, 16 bits"
_ENOUGH = 10, 3
"""Runs of a kind, and its sites, from which on a baseline must not be better."""


@dataclass(frozen=True, slots=True)
class Baselines:
    """Throughput per GPU of a run by two rules that need no simulator.

    `half` is half of the peak with recomputation counted, `single` the one share of the peak that
    fits best to all other sites.
    """

    half: float
    single: float


def baselines(rows: Sequence[Left]) -> list[Baselines]:
    """Those of each row, by all others."""
    shares_of_peak = np.array([row.result.mfu * math.exp(-row.error) for row in rows])
    sites = [row.run.site for row in rows]
    weight, others = weights(sites), {site: np.array(sites) != site for site in set(sites)}
    single = {site: _middle(shares_of_peak[kept], weight[kept]) for site, kept in others.items()}
    made = []
    for row in rows:
        of_one = row.result.tokens_per_s_per_gpu / row.result.mfu
        again = recomputation(row.result.recompute)
        counted = 1 + (again.kind == "full") / (3 * again.every)
        made.append(Baselines(_HALF * of_one / counted, single[row.run.site] * of_one))
    return made


def _middle(values: NDArray[np.float64], weight: NDArray[np.float64]) -> float:
    return float(np.quantile(values, 0.5, weights=weight, method="inverted_cdf"))


def kind_of_run(row: Left) -> str:
    """The kind that tells most of a row."""
    return next((KIND_WORDS[name] for name in KIND_WORDS if parts_of(row.setting)[name]), DENSE)


def beaten(rows: Sequence[Left], simple: Sequence[Baselines]) -> list[str]:
    """Kinds with enough runs and sites of which a baseline has smaller errors."""
    groups: dict[str, list[tuple[Left, Baselines]]] = {}
    for row, rule in zip(rows, simple, strict=True):
        groups.setdefault(kind_of_run(row), []).append((row, rule))
    worse = []
    for kind, some in groups.items():
        sites = {row.run.site for row, _ in some}
        if len(some) < _ENOUGH[0] or len(sites) < _ENOUGH[1]:
            continue
        published = [row.run.tokens_per_s_per_gpu or 1.0 for row, _ in some]
        ours = [abs(math.expm1(row.error)) for row, _ in some]
        for name in ("half", "single"):
            errors = [
                abs(getattr(rule, name) / speed - 1)
                for (_, rule), speed in zip(some, published, strict=True)
            ]
            if math.fsum(errors) < math.fsum(ours):
                worse.append(f"{kind} ({name})")
    return worse


def _sources(runs: Sequence[TrainingRun], results: Sequence[Result]) -> Iterator[SourceErrors]:
    rows = [
        CellPrediction(cell_of_run(run, "tokens_per_s_per_gpu"), result.tokens_per_s_per_gpu)
        for run, result in zip(runs, results, strict=True)
    ]
    for paper, errors in summarized(rows, lambda row: [row.cell.source]).items():
        yield SourceErrors(
            title=title(paper),
            runs=errors.cells,
            mean=round(errors.mape, 4),
            bias=round(errors.median_bias, 4),
        )


def title(paper: str, folder: Path = PAPERS) -> str:
    """Of a source."""
    about = files.toml((folder / paper / "paper.toml").read_text("utf-8"))
    return str(about["title"])


# --- what the catalog says of them ---------------------------------------------------------------


def errors_file(model: ErrorModel) -> tuple[Path, bytes]:
    """The record of the catalog."""
    memory = {"memory": asdict(model.memory)} if model.memory else {}
    kinds = {"kinds": {name: asdict(kind) for name, kind in model.kinds.items()}}
    text = toml_record(
        "Written by `co2analysis runs --fit`, memory also by --evidence: errors on published\n"
        "training runs, each source left out of the fit; see co2sim.prediction.",
        _entry(model) | kinds | memory | {"source": [asdict(source) for source in model.sources]},
    )
    return Path(str(_CATALOG / ERRORS)), text.encode()


def evidence_file(runs: Sequence[TrainingRun], results: Sequence[Result]) -> tuple[Path, bytes]:
    """The record of published runs beside their predictions, without their source."""
    rows = []
    for run, result in zip(runs, results, strict=True):
        cluster, model = run.case().load()
        traits = traits_of(cluster.value, model.value, result)
        assert run.tokens_per_s_per_gpu is not None
        row = PublishedRun(
            **asdict(traits),
            source=title(run.paper),
            model=run.model,
            strategy=result.strategy,
            published=run.tokens_per_s_per_gpu,
            predicted=_rounded(result.tokens_per_s_per_gpu),
        )
        rows.append(asdict(row))
    content = pd.DataFrame(rows).to_csv(index=False, lineterminator="\n")
    return Path(str(_CATALOG / EVIDENCE)), content.encode()


def catalog_files(values: Values, spread: float) -> dict[Path, bytes]:
    """The files of GPUs, stacks and defaults, with the fitted values in place of theirs.

    `spread` is that of the stack that stands for all.
    """
    import tomlkit  # noqa: PLC0415 - only to write

    contents: dict[Path, bytes] = {}
    every = _changes(values)
    every[Path(str(_CATALOG / f"stacks/{UNKNOWN}.toml"))]["spread"] = spread
    for path, changes in every.items():
        document: Any = tomlkit.parse(path.read_text("utf-8"))
        for dotted, value in changes.items():
            node, (*tables, last) = document, dotted.split(".")
            for table in tables:
                node = node[table]
            if isinstance(node[last], dict):
                node[last]["value"] = value
            else:
                node[last] = value
        contents[path] = tomlkit.dumps(document).encode()
    return contents


def _changes(values: Values) -> dict[Path, dict[str, Any]]:
    """Values by file and by place in it, as files state them."""
    changes: dict[Path, dict[str, Any]] = {}

    def put(file: str, path: str, shared: Shared) -> None:
        value = _rounded(values[shared.name])
        stated = f"{value * 1e6:.4g} us" if shared.unit == "s" else value
        changes.setdefault(Path(str(_CATALOG / file)), {})[path] = stated

    for shared in SHARED:
        if shared.gpus:
            for name in names("gpus"):
                about = files.toml((_CATALOG / "gpus" / f"{name}.toml").read_text("utf-8"))
                same = about.get("generation") in shared.gpus or name in shared.likewise
                if same and "products" in about:
                    put(f"gpus/{name}.toml", "products.sustained", shared)
        elif shared.stacks:
            for name in shared.stacks:
                put(f"stacks/{name}.toml", shared.path.removeprefix("stack."), shared)
        else:
            put("defaults.toml", shared.path, shared)
    return changes
