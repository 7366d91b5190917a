"""A software stack of a user's own, from runs that were measured: few numbers, with priors.

What the stack and the cluster state is the prior of every number; how far sources differ is its
spread. The values are those that make priors and runs together most likely. So one run moves what
it depends on, in proportion to how unsure that is, and what no run depends on stays.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import tomlkit
from numpy.typing import NDArray

from co2sim.catalog import names
from co2sim.catalog.facts import override, read
from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds, counted
from co2sim.hardware.cluster import Cluster
from co2sim.prediction.intervals import setting_of
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.schedule.schedule import Compute
from co2sim.simulation.costs import KernelParts, compute_time, kernel_parts
from co2sim.studies.measured_runs import MeasuredRun, Profile
from co2sim.studies.run_all import Failure, run_all
from co2sim.training.memory import GIB, reserved
from co2sim.training.stack import CALIBRATED, Stack

_NOISE = 0.03
"""Standard deviation of the logarithm of a throughput or a memory: no run repeats itself better."""
_NOISE_OF_KERNELS = 0.1
"""Of the time of a class of kernels: communication beside them slows them down by so much."""
_FAR = 0.7
"""By how much a logarithm moves at most in one iteration."""
_STEP = 0.08
"""Of a logarithm, for finite differences."""
_ITERATIONS = 3
_SOME = 0.1
"""Of its spread: a number of which runs determine less stays as it was."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a stack that runs determine.

    `spread` is the standard deviation of its logarithm between sources; it lies between `least` and
    `most`.
    """

    name: str
    meaning: str
    spread: float
    least: float = 0.0
    most: float = math.inf
    unit: str = ""

    def before(self, cluster: Cluster, stack: Stack) -> float | None:
        """What the stack, or else the cluster, states; None where neither has it."""
        stated: float | None = getattr(stack, self.name)
        if stated is not None:
            return stated
        if self.name == "sustained":
            return cluster.gpu.products.sustained if cluster.gpu.products else None
        links = {"network_efficiency": "efficiency", "ring_loss": "ring_loss"}
        value: float = (
            getattr(cluster.inter, links[self.name])
            if self.name in links
            else getattr(cluster, self.name)
        )
        return value

    def text(self, value: float) -> str:
        """The value within its bounds, as a file states it."""
        within = min(max(value, self.least), self.most)
        return f"{within!r} {self.unit}" if self.unit else repr(within)


NUMBERS: tuple[Number, ...] = (
    Number("sustained", "speed of matrix products, of that alone and cool", 0.12, most=1.0),
    Number("elementwise", "memory traffic of other kernels, of the least", 0.35, least=1.0),
    Number("call_overhead", "what the host needs for an operation", 0.5, unit="s"),
    Number("network_efficiency", "payload of what links between nodes carry", 0.4, most=1.0),
    Number("ring_loss", "what a ring loses with every doubling of its nodes", 0.6, most=2.0),
    Number("interference", "what compute loses beside communication", 0.6, most=1.0),
    Number("node_spread", "differences between nodes", 0.6, most=0.2),
    Number("kept", "activations that a layer keeps, of those needed", 0.3, least=1.0),
)
"""Spreads are those of the fit to published runs (docs/stacks.md), wider for `sustained`: GPUs of
one kind are sold with limits of power from 500 to 700 W. That of `network_efficiency` is between
TCP and RDMA, that of `kept` between 1 and 1.65."""

_ABSURD = 20.0
"""How many times faster or slower than predicted no run is: its unit, or its row, is wrong."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What runs say of a stack.

    `before` is what the numbers were, in SI units, and `determined` by which part of its spread
    each is less unsure. `values` are those of which that is not too little: the others stay as
    they were. `first` and `last` are predictions of the runs before and after.
    """

    values: Mapping[str, float]
    before: Mapping[str, float]
    determined: Mapping[str, float]
    first: tuple[Result, ...]
    last: tuple[Result, ...]


def overrides(values: Mapping[str, float]) -> dict[str, str]:
    """Values of numbers as overrides of a case."""
    return {f"stack.{n.name}": n.text(values[n.name]) for n in NUMBERS if n.name in values}


def moved(case: Question, values: Mapping[str, float]) -> Question:
    """The case with these values."""
    return replace(case, overrides={**case.overrides, **overrides(values)})


def calibrate(
    runs: Sequence[MeasuredRun], jobs: int = 1, *, progress: bool | None = None
) -> Calibrated:
    """The numbers that runs on one cluster with one stack determine.

    Raises OptionError without a run, where nothing can be determined, and with the reason of the
    first run that cannot be simulated.
    """
    if not runs:
        raise OptionError("no runs; a calibration needs at least one")
    before = _stated(runs)
    numbers = [one for one in NUMBERS if one.name in before]
    noise = _Observed(runs).noise

    def errors(values: Mapping[str, float], what: str) -> tuple[list[Result], Array]:
        cases = [moved(run.case, values) for run in runs]
        results = [
            _result(run, one)
            for run, one in zip(
                runs, run_all(cases, jobs, progress=progress, what=what), strict=True
            )
        ]
        return results, _Observed(runs).errors(cases, results)

    first, base = errors(before, "predicting runs")
    _check_likely(runs, first)
    values, determined = dict(before), dict.fromkeys(before, 0.0)
    for iteration in range(_ITERATIONS):
        slopes = np.zeros((len(base), len(numbers)))
        for column, one in enumerate(numbers):
            step = -_STEP if values[one.name] * math.exp(_STEP) > one.most else _STEP
            shifted = {**values, one.name: values[one.name] * math.exp(step)}
            slopes[:, column] = (errors(shifted, f"moving {one.name}")[1] - base) / step
        slopes /= noise[:, None]
        shares = _determined(numbers, slopes)
        if not iteration:
            kept = [shares[one.name] >= _SOME for one in numbers]
            numbers = [one for one, keep in zip(numbers, kept, strict=True) if keep]
            if not numbers:
                raise OptionError("these runs determine nothing: none of the numbers changes them")
            slopes = slopes[:, kept]
        determined |= {one.name: shares[one.name] for one in numbers}
        values |= _most_likely(numbers, values, before, base / noise, slopes)
        last, base = errors(values, "predicting runs")
    values_of = {one.name: values[one.name] for one in numbers}
    return Calibrated(values_of, before, determined, tuple(first), tuple(last))


def _stated(runs: Sequence[MeasuredRun]) -> dict[str, float]:
    """What each number is before; those that no cluster states, or states to be 0, are left out."""
    cluster, stack = runs[0].case.load()[0].value, runs[0].case.load_stack().value
    if cluster.gpu.kernels is None or cluster.gpu.stack != stack.name:
        raise OptionError(_fixed_kernels(cluster))
    if cluster.gpu.name in stack.kernels or cluster.gpu.generation in stack.kernels:
        raise OptionError(
            f"the kernels of {stack.name} on {cluster.gpu.name} are fitted, and nothing moves them;"
            " begin with another stack"
        )
    named = {one.name: one.before(cluster, stack) for one in NUMBERS}
    values = {name: value for name, value in named.items() if value}
    if all(run.memory is None for run in runs):
        del values["kept"]
    return values


def _fixed_kernels(cluster: Cluster) -> str:
    """Why no stack changes the kernels of a cluster, and which cluster file to take instead."""
    gpu = cluster.gpu
    states = "efficiencies by size" if gpu.kernels is None else "the times of its kernels"
    same = (gpu.generation or "").lower()
    instead = same if same in names("gpus") else "h100"
    return (
        f"no stack changes the kernels of {cluster.name}: its file states {states} of the GPU; take"
        " a GPU of the catalog that states products: probe with --gpu NAME, such as `realrun probe"
        f' --gpu {instead}`, or write gpu = "{instead}" into the cluster file'
    )


def _check_likely(runs: Sequence[MeasuredRun], results: Sequence[Result]) -> None:
    """Refuse what can only be a mistake: speeds and memories in other units."""
    for run, result in zip(runs, results, strict=True):
        predicted, measured = result.tokens_per_s_per_gpu, run.tokens_per_s_per_gpu
        if not 1 / _ABSURD < measured / predicted < _ABSURD:
            raise OptionError(
                f"{run.where}: {measured:,.4g} tokens/s of a GPU were measured, and"
                f" {predicted:,.4g} are predicted; a factor of more than {_ABSURD:g} is a mistake"
            )
        if run.memory is not None and not 0.1 * GIB <= run.memory <= result.gpu_memory_bytes:
            raise OptionError(
                f"{run.where}: memory_gib is {run.memory / GIB:,.4g}; it must be 0.1 to"
                f" {result.gpu_memory_bytes / GIB:.4g}, what the GPU has"
            )


def _result(run: MeasuredRun, outcome: Result | Failure) -> Result:
    if isinstance(outcome, Failure):
        raise OptionError(f"{run.where}: {outcome.reason}")
    return outcome


@dataclass(frozen=True, slots=True)
class _Observed:
    """What is known of runs: throughput of each, then memory and times of kernels of some."""

    runs: Sequence[MeasuredRun]

    @property
    def noise(self) -> Array:
        """Standard deviations of the errors."""
        memories = sum(run.memory is not None for run in self.runs)
        kernels = sum(len(_of_profile(run.profile)) for run in self.runs)
        single = [_NOISE] * (len(self.runs) + memories)
        return np.array([*single, *[_NOISE_OF_KERNELS] * kernels])

    def errors(self, cases: Sequence[Question], results: Sequence[Result]) -> Array:
        """Log(predicted / measured)."""
        speeds = [
            result.tokens_per_s_per_gpu / run.tokens_per_s_per_gpu
            for run, result in zip(self.runs, results, strict=True)
        ]
        memories = [
            reserved(result.memory_bytes_per_gpu) / run.memory
            for run, result in zip(self.runs, results, strict=True)
            if run.memory is not None
        ]
        kernels: list[float] = []
        for run, case in zip(self.runs, cases, strict=True):
            if run.profile is not None:
                seconds = kernel_seconds(case)
                kernels += [
                    getattr(seconds, kind) / getattr(run.profile, kind)
                    for kind in _of_profile(run.profile)
                ]
        return np.log([*speeds, *memories, *kernels])


def _of_profile(profile: Profile | None) -> list[str]:
    """Classes of kernels that a trace has."""
    kinds = "products", "elementwise"
    return [kind for kind in kinds if profile is not None and getattr(profile, kind) > 0]


def kernel_seconds(case: Question) -> KernelParts:
    """What a GPU spends on kernels in an optimizer step; what is no pass counts as elementwise.

    Raises OptionError for a pipeline, whose stages differ.
    """
    stage = case.stage()
    gpu, times = stage.cluster.gpu, stage.cluster.gpu.kernels
    sums: dict[str, Seconds] = dict.fromkeys(("products", "attention", "elementwise"), 0.0)
    for work in _works(op.work for op in stage.schedule.body if isinstance(op.work, Compute)):
        if work.kernels and times:
            parts = kernel_parts(work.kernels, gpu, times, stage.precision)
            for name in sums:
                sums[name] += getattr(parts, name)
        elif work.place == "gpu":
            sums["elementwise"] += compute_time(work, gpu, stage.precision)
    steps = stage.schedule.steps
    return KernelParts(**{name: seconds / steps for name, seconds in sums.items()})


def _works(works: Iterable[Compute]) -> Iterable[Compute]:
    for work in works:
        if work.parts:
            yield from _works(work.parts)
        else:
            yield work


def _most_likely(
    numbers: Sequence[Number],
    values: Mapping[str, float],
    before: Mapping[str, float],
    errors: Array,
    slopes: Array,
) -> dict[str, float]:
    """The most likely values, if errors change with logarithms as `slopes` say."""
    from scipy.optimize import least_squares  # noqa: PLC0415 - 0.2 s that no help needs

    spreads = np.array([n.spread for n in numbers])
    logs = np.log([values[n.name] / before[n.name] for n in numbers])

    def residuals(moves: Array) -> Array:
        return np.concatenate([errors + slopes @ moves, (logs + moves) / spreads])

    low, high = (
        np.array([_log(getattr(n, end) / values[n.name]) for n in numbers])
        for end in ("least", "most")
    )
    bounds = np.minimum(low, 0) - 1e-9, np.maximum(high, 0) + 1e-9
    solved = least_squares(residuals, np.zeros(len(numbers)), bounds=bounds)
    return {
        n.name: float(min(max(values[n.name] * math.exp(move), n.least), n.most))
        for n, move in zip(numbers, solved.x, strict=True)
    }


def _log(ratio: float) -> float:
    """How far a logarithm may move."""
    return (
        min(max(math.log(ratio), -_FAR), _FAR)
        if 0 < ratio < math.inf
        else math.copysign(_FAR, ratio - 1)
    )


def _determined(numbers: Sequence[Number], slopes: Array) -> dict[str, float]:
    """By which part of its spread each number is less unsure."""
    spreads = np.array([n.spread for n in numbers])
    precision = slopes.T @ slopes + np.diag(spreads**-2.0)
    left = np.sqrt(np.diag(np.linalg.inv(precision))) / spreads
    return {n.name: 1 - float(share) for n, share in zip(numbers, left, strict=True)}


HEAD = "Written by `co2sim calibrate`"
"""How such a file begins, behind its sign of a comment."""


def stack_file(
    job: Question, runs: Sequence[MeasuredRun], calibrated: Calibrated, name: str
) -> bytes:
    """TOML; `name` is that of the file of runs. Raises OptionError for a stack without a file."""
    stack = job.chosen_stack
    if not isinstance(stack, str):
        raise OptionError("the stack must be a name or a file")
    tree: dict[str, Any] = read("stacks", stack)
    for path, text in job.overrides.items():
        if path.startswith("stack."):
            override(tree, path.removeprefix("stack."), text)
    document = tomlkit.document()
    document.add(tomlkit.comment(f"{HEAD}. Predict with it: --stack THIS_FILE"))
    name_before = job.load_stack().value.name.partition(CALIBRATED)[0]
    measured = [*tree.get("measured", ()), *_settings(runs, calibrated)]
    tree["name"] = f"{name_before}{CALIBRATED}{counted(len(measured), 'run')}"
    for n in NUMBERS:
        if n.name in calibrated.values:
            tree[n.name] = {
                "value": _rounded(calibrated.values[n.name], n.unit),
                "source": f"`co2sim calibrate`, {name}: {calibrated.determined[n.name]:.0%}"
                f" determined; it was {_rounded(calibrated.before[n.name], n.unit)}",
            }
    tree["measured"] = measured
    for key, value in tree.items():
        document[key] = value
    return tomlkit.dumps(document).encode()


def _rounded(value: float, unit: str) -> float | str:
    return f"{value * 1e6:.4g} us" if unit else float(f"{value:.4g}")


def _settings(runs: Sequence[MeasuredRun], calibrated: Calibrated) -> list[dict[str, Any]]:
    settings = []
    for run, result in zip(runs, calibrated.last, strict=True):
        setting = setting_of(moved(run.case, calibrated.values).job(), result)
        misfit = abs(math.log(result.tokens_per_s_per_gpu / run.tokens_per_s_per_gpu))
        settings.append(asdict(replace(setting, misfit=round(misfit, 4))))
    return settings
