"""The errors of a run by op: means, shares of the whole error, and causes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from analysis.measured.attribution import Cause, Difference, dominant, totals
from analysis.measured.comparison import RunComparison
from co2sim.schedule import Collective, Op, Schedule
from co2sim.units import Seconds, scaled


@dataclass(frozen=True, slots=True)
class OpError:
    """The error of the ops that share a label, in one run.

    `instances` is how often they ran in the measured rounds, over all ranks; `count` the same per
    round and rank. `predicted` and `measured` are means per instance. `parts` are sums over all
    instances. `share`, 0 to 1, is the sum of absolute errors over that of the whole run. `cause` is
    None where both traces agree.
    """

    label: str
    count: float
    instances: int
    predicted: Seconds
    measured: Seconds
    share: float
    parts: Mapping[Cause, Seconds]
    cause: Cause | None

    @property
    def error(self) -> float | None:
        """Signed error of the predicted mean, as a fraction of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


def labels(schedule: Schedule) -> dict[str, str]:
    """Label of every op: ops that differ only in numbers (of a step, a layer) share it."""
    names = {op.name: _label(op) for op in schedule.body}
    sizes: dict[str, list[float]] = {}
    for op in schedule.body:
        if isinstance(op.work, Collective):
            sizes.setdefault(names[op.name], []).append(op.work.bytes)
    shown = {}
    for label, lengths in sizes.items():
        least, most = scaled(min(lengths), "B"), scaled(max(lengths), "B")
        shown[label] = f"{label}, {least}" + (f" to {most}" if most != least else "")
    return {name: shown.get(label, label) for name, label in names.items()}


def _label(op: Op) -> str:
    work = op.work
    if isinstance(work, Collective):
        return f"{work.kind} {_family(work.buffer)} over {work.group}"
    family = _family(op.name.rpartition(".")[2])
    return work.kernel if family == work.kernel else f"{work.kernel} {family}"


def _family(name: str) -> str:
    """The name with a star in place of every number."""
    return re.sub(r"\d+", "*", name)


def by_label(comparison: RunComparison) -> list[OpError]:
    """One entry per label, those with the largest share of the error first."""
    names = labels(comparison.schedule)
    return _grouped(comparison, lambda difference: names[difference.op])


def by_op(comparison: RunComparison) -> list[OpError]:
    """One entry per op of the schedule, in its order."""
    order = {op.name: place for place, op in enumerate(comparison.schedule.body)}
    entries = _grouped(comparison, lambda difference: difference.op)
    return sorted(entries, key=lambda entry: order[entry.label])


def _grouped(comparison: RunComparison, key: Callable[[Difference], str]) -> list[OpError]:
    """One entry per value of `key`, those with the largest share of the error first."""
    groups: dict[str, list[Difference]] = {}
    for difference in comparison.differences:
        groups.setdefault(key(difference), []).append(difference)
    rounds_of_ranks = len({(d.round, d.rank) for d in comparison.differences})
    whole = sum(abs(d.error) for d in comparison.differences)
    entries = []
    for label, members in groups.items():
        predicted = sum(d.predicted for d in members)
        measured = sum(d.measured for d in members)
        parts = totals(members)
        entries.append(
            OpError(
                label=label,
                count=len(members) / rounds_of_ranks,
                instances=len(members),
                predicted=predicted / len(members),
                measured=measured / len(members),
                share=sum(abs(d.error) for d in members) / whole if whole else 0.0,
                parts=parts,
                cause=dominant(parts, measured - predicted, predicted),
            )
        )
    return sorted(entries, key=lambda entry: -entry.share)


def causes(entries: Sequence[OpError]) -> dict[Cause, float]:
    """Share of each cause in all parts of the entries that do not agree, largest first.

    They sum to 1, or are all 0.
    """
    wrong = [entry for entry in entries if entry.cause]
    sizes = {cause: sum(abs(entry.parts[cause]) for entry in wrong) for cause in Cause}
    whole = sum(sizes.values())
    ordered = sorted(sizes, key=lambda cause: -sizes[cause])
    return {cause: sizes[cause] / whole if whole else 0.0 for cause in ordered}
