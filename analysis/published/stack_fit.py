"""What is fitted to published training runs: few numbers of stacks, GPUs and networks.

All runs are fitted at once, with a prior on every number. Runs of a site (one machine, one who
tuned it) are off together, so their errors have a covariance. Then each site is left out in turn.
Errors that are quoted are those of predictions with the numbers that were found without the site
(`papers/stack_fit.toml`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from analysis.published.predict import simulated
from analysis.published.runs import PAPERS, TrainingRun
from co2sim.catalog import load_cluster
from co2sim.common import files
from co2sim.models.operators import ExpertExchange
from co2sim.prediction.intervals import distance, setting_of
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.training.stack import Setting

Values: TypeAlias = Mapping[str, float]

RECORD = "stack_fit.toml"
"""The file of `papers/` with all values, and with those that each source was left out of."""

_SITE, _NEAR, _OWN = 0.1, 0.08, 0.1
"""Standard deviations of what errors of a site share, of what those do that are near, and of each:
about those that are then found (`run_errors.likeliest`). Runs of a site that are all off together
say no more than a few, and how they differ says most. Of three settings that were tried this one
had the smallest bias with sites left out."""
_ROBUST = 1.5
"""Standard deviations from which on an error counts linearly, not squared."""
_FAR = 0.7
"""By how much a logarithm moves at most in one iteration."""
_STEP = 0.08
"""Of a logarithm, for finite differences."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A number that several published runs share: where it stands, and what is known before.

    `prior` is in SI units, `spread` the standard deviation of its logarithm. It holds for runs on
    `gpus` (generations) with `stacks` (catalog names); for all where none is named, and is assumed
    of the GPUs that are `likewise` (catalog names). It lies between `least` and `most`.
    """

    name: str
    path: str
    prior: float
    spread: float
    least: float = 0.0
    most: float = math.inf
    unit: str = ""
    gpus: tuple[str, ...] = ()
    likewise: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()

    def holds_for(self, run: TrainingRun) -> bool:
        """Whether the run has it."""
        if self.path == "stack.grouped" and not routes(run):
            return False
        return (not self.gpus or generation(run) in self.gpus) and (
            not self.stacks or run.stack in self.stacks
        )

    def text(self, value: float) -> str:
        """The value within its bounds, as an override."""
        within = min(max(value, self.least), self.most)
        return f"{within!r} {self.unit}" if self.unit else repr(within)


def _sustained(gpu: str) -> Shared:
    """The fraction of a cool GPU's matrix speed that lasts through a training."""
    gpus, likewise = _ALIKE.get(gpu, ((gpu,), ()))
    return Shared(
        f"sustained.{gpu}",
        "gpu.products.sustained",
        *(0.84, 0.08),
        most=1.0,
        gpus=gpus,
        likewise=likewise,
    )


_ALIKE = {
    "A100": (("A100",), ("l40s",)),
    "H100": (("H100",), ("mi300x", "mi325x", "mi355x")),
    "B200": (("B200", "B300"), ("rtx-pro-6000",)),
}
"""Generations that have the number of one, and GPUs without runs of which it is assumed."""


def _elementwise(kind: str, prior: float, *stacks: str) -> Shared:
    return Shared(f"elementwise.{kind}", "stack.elementwise", prior, 0.35, least=1.0, stacks=stacks)


def _host(kind: str, *stacks: str) -> Shared:
    return Shared(
        f"call_overhead.{kind}", "stack.call_overhead", 50e-6, 0.5, unit="s", stacks=stacks
    )


UNKNOWN = "unknown"
"""The stack that stands for all."""

_OTHERS = (
    *("torchtitan", "torchtitan-eager", "huggingface", "internevo", "litgpt", "llm-c", UNKNOWN),
    *("megatron-llama", "colossalai", "megatron-deepspeed", "megatron-2021", "megatron-2023"),
    "megatron-core",
)
_FITTED = (*_OTHERS, "nanotron", "xla")

SHARED: tuple[Shared, ...] = (
    replace(_sustained("V100"), spread=0.25),  # the speed of its products is assumed
    *map(_sustained, ("A100", "H100", "B200")),
    _elementwise("eager", 3.0, "torchtitan-eager", "huggingface"),
    _elementwise("nanotron", 3.0, "nanotron"),
    _elementwise("compiled", 1.5, "torchtitan"),
    _elementwise("fused", 1.8, "internevo", "litgpt", "megatron-llama", "colossalai", UNKNOWN),
    _elementwise("megatron", 2.0, "megatron-deepspeed", "megatron-2021", "megatron-2023"),
    _elementwise("engine", 1.2, "megatron-core", "llm-c"),
    _elementwise("xla", 2.0, "xla"),
    _host("nanotron", "nanotron"),
    _host("xla", "xla"),
    _host("others", *_OTHERS),
    Shared("grouped", "stack.grouped", 0.7, 0.3, most=1.0, stacks=_FITTED),
    Shared("ring_loss", "inter.ring_loss", 0.15, 0.6, most=2.0),
    Shared("interference", "interference", 0.15, 0.6, most=1.0),
    Shared("node_spread", "node_spread", 0.015, 0.6, most=0.2),
)
"""Priors: kernels without fusion move three times the least traffic and fused ones less than twice;
a host needs 39 us for each of our operations in Transformers on a B200 (3,050 us a layer in three
passes: stas00/ml-engineering, training/performance) and 58 us in Megatron-DeepSpeed on an A100
(papers/vtrain); rings over 2 to 128 nodes by NVIDIA/nccl issues 1218 and 1229;
interference and spread of nodes by Lee et al. 2025 (arXiv 2507.03114) and Sinha et al. (SC22);
products of experts between 0.6 of others (SimuMax, on B200; its runs are among those fitted) and as
fast as these (DeepGEMM 55ab91f, README.md, on H800)."""


@cache
def _generation(cluster: str, gpu: str | None) -> str:
    named = {} if gpu is None else {"gpu": gpu}
    return load_cluster(cluster, named).value.gpu.generation or ""


def generation(run: TrainingRun) -> str:
    """The generation of the run's GPU, such as H100 for an H200."""
    return _generation(run.cluster, run.overrides.get("gpu"))


def routes(run: TrainingRun) -> bool:
    """Whether its model has experts."""
    return any(block.of(ExpertExchange) for block in run.trained().blocks)


def overrides(run: TrainingRun, values: Values) -> dict[str, str]:
    """The values that hold for a run, as overrides of its case."""
    return {each.path: each.text(values[each.name]) for each in SHARED if each.holds_for(run)}


def predictions(
    runs: Sequence[TrainingRun], values: Sequence[Values | None], jobs: int, what: str
) -> list[Result]:
    """Each run simulated with its values; None for those of the catalog.

    Recomputation that a source does not state is none where that fits, else full. Raises the error
    of the first run that fails.
    """

    def case(run: TrainingRun, of_run: Values | None, **changes: str) -> Question:
        return run.case({} if of_run is None else overrides(run, of_run), **changes)

    results = simulated([case(*pair) for pair in zip(runs, values, strict=True)], jobs, what)
    full = [
        index
        for index, (run, result) in enumerate(zip(runs, results, strict=True))
        if run.recompute == "auto" and not result.fits_in_memory
    ]
    cases = [case(runs[index], values[index], recompute="full") for index in full]
    for index, result in zip(full, simulated(cases, jobs, what, progress=False), strict=True):
        results[index] = result
    return results


def setting_in(case: Question, result: Result) -> Setting:
    """What the result of a case is like."""
    return setting_of(case.job(), result)


def log_errors(runs: Sequence[TrainingRun], results: Iterable[Result]) -> NDArray[np.float64]:
    """Log(predicted / published) of the throughput per GPU."""
    errors = []
    for run, result in zip(runs, results, strict=True):
        assert run.tokens_per_s_per_gpu is not None  # of headline runs
        errors.append(math.log(result.tokens_per_s_per_gpu / run.tokens_per_s_per_gpu))
    return np.array(errors)


@dataclass(frozen=True, slots=True)
class Linear:
    """Errors of runs around some values, and how each changes with the logarithms of these.

    `settings` are what runs are like.
    """

    runs: tuple[TrainingRun, ...]
    settings: tuple[Setting, ...]
    values: Values
    errors: NDArray[np.float64]
    slopes: NDArray[np.float64]

    def without(self, site: str | None) -> Values:
        """The values that are most likely by all sites but one."""
        parts = [
            (root @ self.errors[rows], root @ self.slopes[rows])
            for name, (rows, root) in self._roots.items()
            if name != site
        ]
        errors, slopes = (np.concatenate(some) for some in zip(*parts, strict=True))
        priors = np.array([math.log(self.values[shared.name] / shared.prior) for shared in SHARED])
        spreads = np.array([shared.spread for shared in SHARED])

        def residuals(moves: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.concatenate([errors + slopes @ moves, (priors + moves) / spreads])

        start = np.zeros(len(SHARED))
        solution = least_squares(
            residuals, start, loss="soft_l1", f_scale=_ROBUST, bounds=(-_FAR, _FAR)
        )
        return {
            shared.name: float(
                min(max(self.values[shared.name] * math.exp(move), shared.least), shared.most)
            )
            for shared, move in zip(SHARED, solution.x, strict=True)
        }

    @property
    def _roots(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """The rows of each site, and what makes their errors independent, each of size 1."""
        sites = np.array([run.site for run in self.runs])
        made = {}
        for site in sorted({run.site for run in self.runs}):
            rows = np.flatnonzero(sites == site)
            some = [self.settings[row] for row in rows]
            apart = np.array([[distance(here, there) for there in some] for here in some])
            covariance = _SITE**2 + _NEAR**2 * np.exp(-apart) + _OWN**2 * np.eye(len(rows))
            made[site] = rows, np.linalg.inv(np.linalg.cholesky(covariance))
        return made


def linearized(runs: Sequence[TrainingRun], values: Values, jobs: int) -> Linear:
    """By finite differences: one simulation of a run for each number that it has, and one more."""
    count = len(runs)
    results = predictions(runs, [values] * count, jobs, "predicting runs")
    base = log_errors(runs, results)
    settings = tuple(setting_in(run.case(), of) for run, of in zip(runs, results, strict=True))
    slopes = np.zeros((count, len(SHARED)))
    for column, shared in enumerate(SHARED):
        having = [row for row, run in enumerate(runs) if shared.holds_for(run)]
        moved = {**values, shared.name: values[shared.name] * math.exp(_STEP)}
        some = [runs[row] for row in having]
        results = predictions(some, [moved] * len(some), jobs, f"moving {shared.name}")
        slopes[having, column] = (log_errors(some, results) - base[having]) / _STEP
    return Linear(tuple(runs), settings, values, base, slopes)


@dataclass(frozen=True, slots=True)
class StackFit:
    """Values fitted to all sites, and those that were found without each, by its key."""

    values: Values
    left_out: Mapping[str, Values]


def fit(runs: Sequence[TrainingRun], start: Values, iterations: int, jobs: int) -> StackFit:
    """Gauss-Newton steps from `start`, else from priors; sites are left out in the last."""
    values: Values = {shared.name: start.get(shared.name, shared.prior) for shared in SHARED}
    for _ in range(iterations - 1):
        values = linearized(runs, values, jobs).without(None)
    last = linearized(runs, values, jobs)
    sources = sorted({run.site for run in runs})
    return StackFit(last.without(None), {source: last.without(source) for source in sources})


def written(fitted: StackFit) -> str:
    """The record as TOML; values in SI units."""

    def rounded(values: Values) -> dict[str, float]:
        return {name: float(f"{value:.4g}") for name, value in values.items()}

    left_out = {source: rounded(values) for source, values in fitted.left_out.items()}
    return toml_record(
        "Written by `co2analysis runs --fit`: what is fitted to published runs, in SI units.\n"
        "Errors of a source are those with the values of its [left_out], which did not know it.",
        {"values": rounded(fitted.values), "left_out": left_out},
    )


def toml_record(comment: str, tree: Mapping[str, Any]) -> str:
    """A file of TOML with a comment in front."""
    import tomlkit  # noqa: PLC0415 - only to write

    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return f"{lines}\n{tomlkit.dumps(tree)}"


def record(folder: Path = PAPERS) -> StackFit:
    """The record that `written` made. Raises CatalogError where there is none."""
    tree = files.toml_file(folder / RECORD)
    return StackFit(tree["values"], tree["left_out"])
