"""From measured times of kernels to the numbers of a processor: pure functions."""

from collections.abc import Iterable, Sequence

from co2sim.cluster import GPU
from co2sim.units import Flops, FlopsPerSecond, Seconds
from realrun.probe.samples import ComputeSample, Measured, Slowdown

_MOST_SHARE = (
    10 / 11
)  # a cluster's interference is 10 at most; short collectives leave kernels less
_LEAST_SHARE = 0.1  # of a kernel's time is not launch overhead; if it seems so, that is noise


def attained(samples: Iterable[ComputeSample], launch: Seconds) -> dict[Flops, FlopsPerSecond]:
    """Speed by size of a kernel, without the launch overhead that `cost.compute_time` adds."""
    return {
        sample.work.flops: sample.work.flops / _net(sample, launch)
        for sample in sorted(samples, key=lambda sample: sample.work.flops)
    }


def fit_gpu(measured: Measured) -> GPU | None:
    """The processor of a rank; None if no kernel was run.

    Its peak is the best speed that was measured: nothing is known of what it could attain.
    Efficiencies are those of the first precision. The bandwidth of its memory is that of the
    largest copy, which no cache holds.
    """
    if not measured.compute:
        return None
    launch = measured.launch
    found = {name: attained(samples, launch) for name, samples in measured.compute.items()}
    peak = {name: max(speeds.values()) for name, speeds in found.items()}
    first = next(iter(found))
    copy = max(measured.copies, key=lambda sample: sample.work.memory_bytes)
    return GPU(
        measured.machine,
        measured.memory,
        copy.work.memory_bytes / _net(copy, launch),
        peak,
        tuple((flops, speed / peak[first]) for flops, speed in found[first].items()),
        launch_overhead=launch,
    )


def interference(slowdowns: Sequence[Slowdown]) -> tuple[float, Seconds]:
    """By which fraction compute slows down beside communication, and what each call takes besides.

    A collective of `seconds` takes call + share x seconds from the kernels beside it, so that they
    take 1 / (1 - share) times as long but for the call. Short and long collectives tell them apart.
    """
    lost = [(one.seconds, one.seconds * max(0.0, 1 - 1 / one.compute)) for one in slowdowns]
    (short, few), (long, many) = min(lost), max(lost)
    share, call = many / long, 0.0
    if long > short and few / short > share:
        share = max(0.0, (many - few) / (long - short))
        call = few - share * short
    share = min(share, _MOST_SHARE)
    return share / (1 - share), call


def _net(sample: ComputeSample, launch: Seconds) -> Seconds:
    """The time without launch overhead."""
    return max(sample.seconds - launch, _LEAST_SHARE * sample.seconds)
