"""A job beside others on one fabric: what each of them loses where they share uplinks.

`co2sim.simulation.beside` simulates them; here are the questions, and where jobs stand: each has a
part of the nodes of every leaf, in proportion to its nodes, unless `fabric.share` says another.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from co2sim.common.errors import CatalogError, OptionError, nearest
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
    """What becomes of a job where others share its fabric; `lost` are parts of its step time."""

    name: str
    gpus: int
    step: Seconds
    lost: float
    worst: float
    meets: float
    uses: float


def read_beside(text: str, case: Question) -> list[Question]:
    """Jobs of `FILE[:N]` on the fabric of a case. Raises Co2simError for what cannot be read.

    The file says options of co2sim, such as `model = "llama3-8b"`, or is one that a trainer reads.
    """
    path, separator, count = text.rpartition(":")
    if not separator or not count.isdigit():
        path, count = text, "1"
    if not 1 <= int(count) <= _MOST:
        raise OptionError(f"--beside {text}: {count} jobs; it must be 1 to {_MOST}")
    return [_other(Path(path), case)] * int(count)


def _other(path: Path, case: Question) -> Question:
    options: dict[str, Any] = {}
    if path.suffix == ".toml":
        try:
            options = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise CatalogError(f"--beside {path}: {error}") from error
    names = [field.name for field in fields(Question) if field.name not in {"cluster", "noise"}]
    if "model" in options and not isinstance(options["model"], dict):
        for name in options.keys() - set(names):
            raise OptionError(f"--beside {path}: unknown option {name!r}; {nearest(name, names)}")
        overrides = {n: str(value) for n, value in options.pop("overrides", {}).items()}
        values = {**OPEN_BATCH, "strategy": "ddp", **options}
        return Question(cluster=case.cluster, overrides=_of_cluster(case) | overrides, **values)
    reading = read_trainer(path)
    other = reading.question(cluster=case.cluster)
    return replace(other, overrides=_of_cluster(case) | dict(other.overrides))


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
    placed = _placed(cases)
    chosen = [driver.resolve_auto(case) for case in placed]
    sharers, steps, rounds = [], [], []
    for case in chosen:
        job = case.job()
        stage = job.stage()
        what = stage.schedule, stage.cluster
        slowdown = expected_slowdown(*what, precision=stage.precision)
        sharers.append(Sharer(*what, stage.precision, slowdown))
        result = driver.run(case, progress=False)
        steps.append(result.step_time_s)
        rounds.append(stage.schedule.steps)
    with progress_bar("simulating jobs beside each other", shown=progress) as done:
        shared = Meeting(sharers, seed=seed, progress=done).run()
    return [
        Beside(
            name=strategy_title(case.strategy),
            gpus=sharer.cluster.layout.world_size * case.pp,
            step=step,
            lost=_of_step(meeting, meeting.slowdown, step * steps_),
            worst=_of_step(meeting, meeting.worst, step * steps_),
            meets=meeting.meets,
            uses=meeting.uses,
        )
        for case, sharer, meeting, step, steps_ in zip(
            chosen, sharers, shared, steps, rounds, strict=True
        )
    ]


def _of_step(job: Shared, slowdown: float, round_time: Seconds) -> float:
    """The part of its step that a job loses; bubbles of a pipeline lose nothing."""
    return max(0.0, (slowdown - 1) * fmean(job.alone) / round_time)


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
        shares = [count / sum(gpus) for count in gpus]
    if sum(shares) > 1 + 1e-9:
        raise OptionError(
            f"jobs have {' + '.join(f'{share:.3g}' for share in shares)} of the nodes of a leaf;"
            " fabric.share must add up to at most 1"
        )
    return [
        replace(case, overrides={**case.overrides, "fabric.share": repr(share)})
        for case, share in zip(cases, shares, strict=True)
    ]
