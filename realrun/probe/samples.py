"""What a probe measures: times of collectives and of kernels, and how they slow each other down."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from co2sim.common.units import Bytes, Seconds
from co2sim.hardware.cluster import Backend
from co2sim.schedule.schedule import Collective, Compute, Group, Kind, Layout

Before = Literal["meeting", "pause", "equal"]


@dataclass(frozen=True, slots=True)
class Sample:
    """The time that a collective took: the median of its repetitions.

    `drift` is the standard deviation of the logarithms of the medians of the passes. `after` says
    what came before: all ranks met, and then perhaps paused; or an equal collective.
    """

    work: Collective
    seconds: Seconds
    drift: float = 0.0
    after: Before = "meeting"


@dataclass(frozen=True, slots=True)
class ComputeSample:
    """The time that a kernel took on the slowest rank: the median of its repetitions.

    `drift` as in `Sample`.
    """

    work: Compute
    seconds: Seconds
    drift: float = 0.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How many times as long an op takes while the other kind runs as it takes alone.

    `compute`: a kernel during all-reduces of its rank. `communication`: an all-reduce during
    kernels, which takes `seconds` then.
    """

    compute: float
    communication: float
    seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that a probe measured.

    `machine` describes the hardware, `memory` is that of one rank. `compute` has samples by
    precision, `copies` those that only move memory; both are empty when no kernel was run. `launch`
    is the time of an empty op, `handover` what it takes in addition when it waits for another
    stream. `slowdowns` are those of a short all-reduce and a long one, where they were measured,
    and `together` says how many times as long the kernels of two streams take as those of one.
    """

    layout: Layout
    backend: Backend
    machine: str
    memory: Bytes
    collectives: tuple[Sample, ...]
    compute: Mapping[str, tuple[ComputeSample, ...]]
    copies: tuple[ComputeSample, ...]
    launch: Seconds
    handover: Seconds
    slowdowns: tuple[Slowdown, ...]
    together: float | None = None


def by_kind(samples: Iterable[Sample]) -> dict[tuple[Group, Kind], list[Sample]]:
    """The samples by group and kind of collective, by rising size; not those after an equal one."""
    found: dict[tuple[Group, Kind], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.work.bytes):
        if sample.after != "equal":
            found.setdefault((sample.work.group, sample.work.kind), []).append(sample)
    return found
