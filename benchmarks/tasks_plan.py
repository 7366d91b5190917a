"""The plan of the study of tasks: which runs, and with which options."""

from collections.abc import Iterator, Mapping

from convergence_plan import TUNING_SEED, Ask, Configuration, StudyBudget, wanted
from finished_runs import Known

from realrun.train.settings import TaskName

TASKS: tuple[TaskName, ...] = ("text", "masked_text", "digits", "segmentation", "points")
TAU = 12
LATE = "CO2, delay auto"
METHODS = {
    "DDP": "ddp",
    "LocalSGD": f"local_sgd:tau={TAU}",
    "SlowMo": f"slowmo:tau={TAU}",
    "DiLoCo": f"diloco:tau={TAU}",
    "CO2, as published": f"co2:tau={TAU}",
    LATE: f"co2:tau={TAU},delay=auto",
}

Delays = Mapping[TaskName, int]
"""The delay that CO2 has chosen in the lab."""


def budget(task: TaskName, *, quick: bool) -> StudyBudget:
    """How much a task sees."""
    if quick:
        return StudyBudget("tiny", 24, 8, 4, 12, workers=2, quick=True, task=task)
    return StudyBudget(steps=384, warmup=24, eval_every=48, task=task, choices=3)


def tasks(*, quick: bool) -> tuple[TaskName, ...]:
    """Those that are run."""
    return TASKS[2:3] if quick else TASKS


def methods(*, quick: bool) -> tuple[str, ...]:
    """Those that are run."""
    return ("DDP", LATE) if quick else tuple(METHODS)


def configuration(name: str, task: TaskName, delays: Delays) -> Configuration:
    """How a method trains outside the lab: with the delay that was chosen in it."""
    if name != LATE:
        return Configuration(name, METHODS[name])
    options = f"tau={TAU},delay={delays[task]},fragments={TAU}"
    return Configuration(f"{LATE} ({delays[task]})", f"co2:{options}")


def study(delays: Delays, quick: bool, known: Known) -> Iterator[Ask]:  # noqa: FBT001 - a plan
    """Rates and outer steps with a seed of their own, then the best with other seeds."""
    for task in tasks(quick=quick):
        for name in methods(quick=quick):
            yield from of_cell(name, task, delays, known, quick=quick)


def of_cell(
    name: str, task: TaskName, delays: Delays, known: Known, *, quick: bool
) -> Iterator[Ask]:
    """The runs of a method on a task."""
    yield from wanted(configuration(name, task, delays), budget(task, quick=quick), known)


def final(name: str, task: TaskName, delays: Delays, known: Known, *, quick: bool) -> list[Ask]:
    """Those of them that count, once the others are known."""
    asks = of_cell(name, task, delays, known, quick=quick)
    return [ask for ask in asks if ask.seed != TUNING_SEED]
