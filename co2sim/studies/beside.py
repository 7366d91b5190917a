"""A job beside others on one fabric: what each of them loses where they share uplinks.

`co2sim.simulation.beside` simulates them; here are the questions, and where jobs stand: each has a
part of the nodes of every leaf, in proportion to its nodes, unless `fabric.share` says another.
"""

import math
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from co2sim.common.errors import CatalogError, Co2simError, OptionError, nearest
from co2sim.common.progress import progress_bar
from co2sim.common.units import Seconds
from co2sim.prediction import driver
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.simulation.beside import Meeting, Shared, Sharer
from co2sim.simulation.run import expected_slowdown
from co2sim.studies.grid import strategy_title
from co2sim.trainers.reading import read_trainer

_MOST = 8
"""Jobs that may stand beside one."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What becomes of a job where others share its fabric.

    `step_time_s` is its step where it has `leaf_nodes` of each leaf, without the others.
    `lost` is the part of its speed that it loses, in the mean over the draws, with the standard
    `error` of that (None for a single draw), and `worst` in the worst of them. Both may be
    negative, by as much as the times of steps are uncertain. `uses` is the part of the time in
    which it sends over uplinks, `meets` that in which another job does so as well.
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
        raise OptionError(f"--beside {text}: {count!r} jobs; it must be 1 to {_MOST}")
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
        other = read_trainer(path).question(cluster=case.cluster)
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
    overrides = {name: str(value) for name, value in changed.items()}
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
    Raises Co2simError where they share no uplinks, or more nodes than leaves have.
    """
    return Together.of(cases).meet(seed=seed, progress=progress)


@dataclass(frozen=True, slots=True)
class Together:
    """Jobs on one fabric, each with its part of the leaves, and the step of each alone there."""

    cases: Sequence[Question]
    sharers: Sequence[Sharer]
    steps: Sequence[Seconds]

    @classmethod
    def of(cls, cases: Sequence[Question], names: Sequence[str] = ()) -> "Together":
        """Simulate each alone. Errors say which of the `names` they are about, if it has one."""
        chosen, sharers, steps = [], [], []
        for case, name in zip(_placed(cases), names or [""] * len(cases), strict=True):
            with _named(name):
                chosen.append(driver.resolve_auto(case))
                stage = chosen[-1].job().stage()
                what = stage.schedule, stage.cluster
                slowdown = expected_slowdown(*what, precision=stage.precision)
                sharers.append(Sharer(*what, stage.precision, slowdown))
                steps.append(driver.run(chosen[-1], progress=False).step_time_s)
        return cls(chosen, sharers, steps)

    def meet(self, *, seed: int = 0, progress: bool | None = None) -> list[Beside]:
        """What each loses to the others. Raises OptionError for more than can be simulated."""
        with progress_bar("simulating jobs beside each other", shown=progress) as done:
            shared = Meeting(self.sharers, seed=seed, progress=done).run()
        return [
            _beside(case, sharer, step, meeting)
            for case, sharer, step, meeting in zip(
                self.cases, self.sharers, self.steps, shared, strict=True
            )
        ]


def _beside(case: Question, sharer: Sharer, step: Seconds, job: Shared) -> Beside:
    """Of its step a job loses what its rounds do; bubbles of a pipeline lose nothing."""
    alone = step * sharer.schedule.steps
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
        step_time_s=step,
        lost=fmean(lost),
        error=stdev(lost) / math.sqrt(draws) if draws > 1 else None,
        worst=max(lost),
        meets=job.meets,
        uses=job.uses,
        draws=draws,
    )


def _of_leaf(gpus: Sequence[int], nodes: int) -> list[float]:
    """Parts of a leaf that are whole nodes, at least one: by GPUs, as near as they fit."""
    if len(gpus) > nodes:
        raise OptionError(
            f"{len(gpus)} jobs beside each other on leaves of {nodes} nodes; each job needs one of"
            " every leaf: give fewer jobs, or more fabric.leaf.nodes"
        )
    exact = [nodes * count / sum(gpus) for count in gpus]
    counts = [max(1, round(part)) for part in exact]
    while sum(counts) > nodes:
        over = [
            count - part if count > 1 else -math.inf
            for count, part in zip(counts, exact, strict=True)
        ]
        counts = [count - (more == max(over)) for count, more in zip(counts, over, strict=True)]
    return [count / nodes for count in counts]


def _placed(cases: Sequence[Question]) -> list[Question]:
    """The cases with their part of the leaves."""
    if any(case.noise.uneven for case in cases):
        raise OptionError(
            "jobs beside each other are simulated without jitter, straggle and node_speed"
        )
    clusters = [case.load()[0].value for case in cases]
    fabric = clusters[0].fabric
    if fabric is None or fabric.leaf is None:
        raise OptionError(
            "jobs beside each other share uplinks, and the cluster has no [fabric] that says them;"
            " give --set fabric.leaf.nodes=4 --set fabric.leaf.oversubscription=2, say"
        )
    if any("fabric.share" in case.overrides for case in cases):
        shares = [cluster.fabric.share if cluster.fabric else 1.0 for cluster in clusters]
    else:
        gpus = [
            case.gpus or cluster.layout.world_size
            for case, cluster in zip(cases, clusters, strict=True)
        ]
        shares = _of_leaf(gpus, clusters[0].pods[0].nodes)
    if sum(shares) > 1 + 1e-9:
        raise OptionError(
            f"jobs have {' + '.join(f'{share:.3g}' for share in shares)} of the nodes of a leaf;"
            " fabric.share must add up to at most 1"
        )
    return [
        replace(case, overrides={**case.overrides, "fabric.share": repr(share)})
        for case, share in zip(cases, shares, strict=True)
    ]
