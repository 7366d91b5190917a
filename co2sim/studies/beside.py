"""A job beside others on one fabric: what each of them loses where they share uplinks.

`co2sim.simulation.beside` simulates them; here are the questions, and where jobs stand: each has a
part of the nodes of every leaf, in proportion to its nodes, unless `fabric.share` says another.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from co2sim.common.errors import CatalogError, Co2simError, OptionError, nearest
from co2sim.common.progress import progress_bar
from co2sim.common.units import Seconds
from co2sim.hardware.cluster import Cluster
from co2sim.prediction import driver
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.result import Result
from co2sim.simulation.beside import Meeting, Shared, Sharer
from co2sim.simulation.run import expected_slowdown
from co2sim.studies.grid import display_name, strategy_title
from co2sim.trainers.reading import UnknownTrainerError, read_trainer

_MOST = 8
"""Jobs that may stand beside one."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What becomes of a job where others share its fabric.

    `step_time_s` is its step where it has `leaf_nodes` of each leaf, without the others.
    `lost` is the part of its speed that it loses, in the mean over the draws, with the standard
    `error` of that (None for a single draw), and `worst` in the worst of them. Both may be
    negative, by as much as the times of steps are uncertain. `uses` is the part of the time in
    which it sends over uplinks, `meets` that in which another job does so as well. What does not
    fit in memory is simulated as if it did.
    """

    name: str
    model: str
    gpus: int
    leaf_nodes: int
    step_time_s: Seconds
    lost: float
    error: float | None
    worst: float
    meets: float
    uses: float
    draws: int
    fits_in_memory: bool
    memory_fit: str


def read_beside(text: str, case: Question) -> list[Question]:
    """Jobs of `FILE[:N]` on the fabric of a case. Raises Co2simError for what cannot be read.

    The file says options of co2sim, such as `model = "llama3-8b"`, or is one that a trainer reads.
    """
    path, count = file_and_count(text)
    case.load()  # what is wrong with its cluster is not the fault of the file
    return [_other(Path(path), case)] * count


def file_and_count(text: str) -> tuple[str, int]:
    """Of `FILE[:N]`. Raises OptionError for an N that is none."""
    path, separator, count = text.rpartition(":")
    if not separator or not (path.endswith(".toml") or count.lstrip("+-").isdigit()):
        return text, 1  # FILE, or FILE:PART of a trainer
    if not (count.isdecimal() and 1 <= int(count) <= _MOST):
        raise OptionError(f"--beside {path}:N: N is {count!r}; it must be 1 to {_MOST} jobs")
    return path, int(count)


def _other(path: Path, case: Question) -> Question:
    options: dict[str, Any] = {}
    if path.suffix == ".toml":
        try:
            options = tomllib.loads(path.read_text())
        except OSError as error:
            raise CatalogError(
                f"--beside {path}: {(error.strerror or str(error)).lower()}"
            ) from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise CatalogError(f"--beside {path}: {error}") from error
    if not options or any(isinstance(options[n], dict) for n in options.keys() - {"overrides"}):
        try:
            other = read_trainer(path).question(cluster=case.cluster)
        except UnknownTrainerError:
            raise CatalogError(
                f"--beside {path}: neither a job in TOML (model, gpus, strategy, ...; [overrides]"
                ' for numbers such as "fabric.share" = 0.5) nor a file of a trainer'
            ) from None
        return replace(other, overrides=_of_cluster(case) | dict(other.overrides))
    names = [field.name for field in fields(Question) if field.name not in {"cluster", "noise"}]
    for name in options.keys() - set(names):
        raise OptionError(f"--beside {path}: unknown option {name!r}; {nearest(name, names)}")
    if "model" not in options:
        raise OptionError(
            f'--beside {path}: model is missing; say model = "llama3-8b", for example'
        )
    changed = options.pop("overrides", {})
    if not isinstance(changed, dict):
        raise OptionError(f"--beside {path}: overrides is {changed!r}; it must be a table")
    overrides = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in _leaves(changed)
    }
    values = {**OPEN_BATCH, "strategy": "ddp", **options}
    with _named(f"--beside {path}"):
        other = Question(cluster=case.cluster, overrides=_of_cluster(case) | overrides, **values)
        other.load()
    return other


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say in errors which job they are about, if it has a name."""
    try:
        yield
    except Co2simError as error:
        if not name:
            raise
        raise OptionError(f"{name}: {error}") from error


def _of_cluster(case: Question) -> dict[str, str]:
    """What a case changes of its cluster."""
    behind = ("model.", "stack.", "optimizer.")
    return {name: text for name, text in case.overrides.items() if not name.startswith(behind)}


def beside(
    cases: Sequence[Question], *, seed: int = 0, progress: bool | None = None
) -> list[Beside]:
    """What each of several jobs on one fabric loses to the others.

    Each has a part of every leaf, in proportion to its nodes, unless `fabric.share` is given.
    Raises Co2simError where they are on several clusters or fabrics, share no uplinks, or have
    more nodes than leaves.
    """
    return Together.of(cases).meet(seed=seed, progress=progress)


@dataclass(frozen=True, slots=True)
class Together:
    """Jobs on one fabric, each with its part of the leaves, and what each is alone there."""

    cases: Sequence[Question]
    sharers: Sequence[Sharer]
    results: Sequence[Result]

    @classmethod
    def of(cls, cases: Sequence[Question], names: Sequence[str] = ()) -> "Together":
        """Simulate each alone. Errors say which of the `names` they are about, if it has one."""
        chosen, sharers, results = [], [], []
        names = names or [""] * len(cases)
        for case, name in zip(_placed(cases, names), names, strict=True):
            with _named(name):
                chosen.append(driver.resolve_auto(case))
                stage = chosen[-1].job().stage()
                what = stage.schedule, stage.cluster
                slowdown = expected_slowdown(*what, precision=stage.precision)
                sharers.append(Sharer(*what, stage.precision, slowdown))
                results.append(driver.run(chosen[-1], progress=False))
        return cls(chosen, sharers, results)

    def meet(self, *, seed: int = 0, progress: bool | None = None) -> list[Beside]:
        """What each loses to the others. Raises OptionError for more than can be simulated."""
        with progress_bar("simulating jobs beside each other", shown=progress) as done:
            shared = Meeting(self.sharers, seed=seed, progress=done).run()
        return [
            _beside(case, sharer, result, meeting)
            for case, sharer, result, meeting in zip(
                self.cases, self.sharers, self.results, shared, strict=True
            )
        ]


def _beside(case: Question, sharer: Sharer, result: Result, job: Shared) -> Beside:
    """Of its step a job loses what its rounds do; bubbles of a pipeline lose nothing."""
    alone = result.step_time_s * sharer.schedule.steps
    draws = len(job.rounds)
    lost = [
        1 - alone / (alone + round_ - quiet)
        for round_, quiet in zip(job.rounds, job.alone, strict=True)
    ]
    return Beside(
        name=strategy_title(case.strategy),
        model=case.load()[1].value.name,
        gpus=sharer.cluster.layout.world_size * case.pp,
        leaf_nodes=sharer.cluster.pods[0].ours,
        step_time_s=result.step_time_s,
        lost=fmean(lost),
        error=stdev(lost) / math.sqrt(draws) if draws > 1 else None,
        worst=max(lost),
        meets=job.meets,
        uses=job.uses,
        draws=draws,
        fits_in_memory=result.fits_in_memory,
        memory_fit=result.memory_fit,
    )


def _of_leaf(nodes: Sequence[int], leaf: int) -> list[float]:
    """Parts of a leaf that are whole nodes, at least one: by nodes, as near as they fit."""
    if len(nodes) > leaf:
        raise OptionError(
            f"{len(nodes)} jobs beside each other on leaves of {leaf} nodes; each job needs one of"
            " every leaf: give fewer jobs, or more fabric.leaf.nodes"
        )
    exact = [leaf * count / sum(nodes) for count in nodes]
    counts = [max(1, round(part)) for part in exact]
    while sum(counts) > leaf:
        over = [
            count - part if count > 1 else -math.inf
            for count, part in zip(counts, exact, strict=True)
        ]
        counts = [count - (more == max(over)) for count, more in zip(counts, over, strict=True)]
    return [count / leaf for count in counts]


_OF_A_JOB = {"fabric.share", "fabric.placement"}
"""What jobs on one fabric may differ in."""


def _wiring(cluster: Cluster) -> dict[str, Any]:
    """What all jobs on a cluster share, by the names that `--set` has for it."""
    links = {"inter": cluster.inter, "wan": cluster.wan, "fabric": cluster.fabric}
    parts = dict(_leaves({name: asdict(part) for name, part in links.items() if part}))
    parts |= {"gpus_per_node": cluster.gpus_per_node, "fabric.nics": cluster.cards}
    return {name: value for name, value in parts.items() if name not in _OF_A_JOB}


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by their dotted names."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _refuse_other_fabric(first: Question, case: Question) -> None:
    """Raise OptionError where a job is not on the cluster and the fabric of the first one."""
    if case.cluster != first.cluster:
        names = " and ".join(display_name(job.cluster) for job in (first, case))
        raise OptionError(
            f"jobs beside each other must all be on one cluster; these are on {names}"
        )
    ours, others = (job.load()[0].value for job in (first, case))
    whole, other = _wiring(ours), _wiring(others)
    for name in [n for n in whole | other if whole.get(n) != other.get(n)]:
        says = [job.overrides.get(name, "not set") for job in (case, first)]
        raise OptionError(
            f"{name} is {says[0]}, and {says[1]} in the first job; jobs beside each other share one"
            " fabric: of it only fabric.share and fabric.placement may differ"
        )


def _nodes(case: Question) -> int:
    """Of a job. Raises OptionError for a part of a node, which sends nothing over uplinks."""
    cluster = case.load()[0].value
    gpus = case.gpus or cluster.layout.world_size
    if gpus < cluster.gpus_per_node:
        raise OptionError(
            f"{gpus} of the {cluster.gpus_per_node} GPUs of a node send nothing over uplinks; jobs"
            " beside each other have whole nodes"
        )
    return gpus // cluster.gpus_per_node


def _placed(cases: Sequence[Question], names: Sequence[str]) -> list[Question]:
    """The cases with their part of the leaves; errors name the one of the `names` it is about."""
    if not cases:
        raise OptionError("no jobs beside each other; give one Question or more")
    if any(case.noise.uneven for case in cases):
        raise OptionError(
            "jobs beside each other are simulated without jitter, straggle and node_speed"
        )
    cluster = cases[0].load()[0].value
    if cluster.fabric is None or cluster.fabric.leaf is None:
        raise OptionError(
            "jobs beside each other share uplinks, and the cluster has no [fabric] that says them;"
            " give --set fabric.leaf.nodes=4 --set fabric.leaf.oversubscription=2, say"
        )
    nodes = []
    for case, name in zip(cases, names, strict=True):
        with _named(name):
            _refuse_other_fabric(cases[0], case)
            nodes.append(_nodes(case))
    if any("fabric.share" in case.overrides for case in cases):
        fabrics = [case.load()[0].value.fabric for case in cases]
        shares = [fabric.share if fabric else 1.0 for fabric in fabrics]
    else:
        shares = _of_leaf(nodes, cluster.pods[0].nodes)
    if sum(shares) > 1 + 1e-9:
        raise OptionError(
            f"fabric.share of {len(cases)} jobs adds up to {sum(shares):.3g} (1 where none is"
            " given); it must be at most 1"
        )
    return [
        replace(case, overrides={**case.overrides, "fabric.share": repr(share)})
        for case, share in zip(cases, shares, strict=True)
    ]
