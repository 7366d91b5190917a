"""What the probe makes of measured times: fits, a cluster file, a figure; a probe end to end."""

import itertools
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from ranks import realrun_on_ranks
from scipy.special import huber

from co2sim.catalog import load_cluster
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import GPU, Backend, Cluster, HostEffects, Link, TokenBucket
from co2sim.prediction import driver
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import (
    NODE,
    WORLD,
    Collective,
    Compute,
    DType,
    Group,
    Kind,
    Layout,
    Op,
    Schedule,
)
from co2sim.simulation.costs import compute_time, cost_of
from co2sim.simulation.run import execute
from co2sim.simulation.trace import Span, Trace
from co2sim.studies.calibration import Calibrated, calibrate
from co2sim.studies.measured_runs import MeasuredRun
from realrun.probe import fit
from realrun.probe.cluster_file import to_toml
from realrun.probe.fit import (
    ComputeSample,
    Measured,
    Sample,
    Slowdown,
    fit_bursts,
    fit_gpu,
    fit_hosts,
    interference,
    passes,
)
from realrun.probe.probe import (
    PAUSE,
    SWEPT,
    USE,
    before,
    durations,
    groups,
    on_two_streams,
    overlapped,
    slowdown,
    sweep,
    times_as_long,
)

INTRA, INTER = Link(1.3e9, 40e-6), Link(118e6, 150e-6)
SIZES = [2**power for power in range(12, 25, 2)]
SHAPES: list[tuple[Layout, Backend]] = [
    (Layout(1, 4), "gloo"),
    (Layout(4, 1), "gloo"),
    (Layout(2, 2), "gloo"),
    (Layout(2, 8), "nccl"),
]
PROCESSOR = GPU(
    name='a "quick" \\ processor',
    memory=12.34e9,
    memory_bandwidth=28.4e9,
    peak={"fp32": 96.5e9, "bf16": 211e9},
    efficiency=((2e6, 0.25), (8e6, 0.5), (32e6, 1.0)),
    launch_overhead=1.5e-6,
)


def beside(seconds: float, share: float = 0.2, call: float = 1e-3) -> Slowdown:
    """Of kernels, from which an all-reduce takes so much; it takes 1.6 times as long itself."""
    return Slowdown(1 / (1 - share - call / seconds), 1.6, seconds)


BESIDE = beside(0.003), beside(0.1)


def true(layout: Layout, backend: Backend) -> Cluster:
    """A cluster whose numbers a fit has to find."""
    return fit.bare(layout, backend, INTRA, INTER)


def times(
    cluster: Cluster, noise: float = 0.0, among: Sequence[Group] | None = None
) -> list[Sample]:
    """What a sweep would measure there, if the cost model were the truth, but for noise."""
    chance = random.Random(7)  # noqa: S311 - noise
    works = [
        Collective(kind, "swept", size // 4, DType.FP32, group)
        for group in among or groups(cluster.layout)
        for kind in Kind
        for size in SIZES
    ]
    return [
        Sample(
            work, cost_of(work, cluster).duration_alone(cluster) * math.exp(chance.gauss(0, noise))
        )
        for work in works
    ]


def measured(layout: Layout, backend: Backend = "gloo", *, kernels: bool = True) -> Measured:
    """What a probe would see of PROCESSOR, INTRA and INTER."""
    flops = [Compute("probe", flops) for flops, _ in PROCESSOR.efficiency]
    copies = [Compute("probe", 0.0, size) for size in (1e6, 1e8)]
    precisions = PROCESSOR.peak if kernels else {}
    return Measured(
        layout=layout,
        backend=backend,
        machine=PROCESSOR.name,
        memory=PROCESSOR.memory,
        collectives=tuple(times(true(layout, backend))),
        compute={
            name: tuple(ComputeSample(work, compute_time(work, PROCESSOR, name)) for work in flops)
            for name in precisions
        },
        copies=tuple(ComputeSample(work, compute_time(work, PROCESSOR, "fp32")) for work in copies),
        launch=PROCESSOR.launch_overhead,
        slowdowns=BESIDE if kernels and layout.world_size > 1 else (),
        together=1.9 if kernels and layout.world_size > 1 else None,
    )


def test_an_outlier_moves_the_fit_little() -> None:
    """One of the largest collectives that took ten times as long changes bandwidth by under 5 %."""
    layout = Layout(4, 1)
    samples = times(true(layout, "gloo"), noise=0.02)
    samples[6] = replace(samples[6], seconds=10 * samples[6].seconds)
    _, inter = fit.fit_links(samples, layout, "gloo")
    assert inter
    assert inter.bandwidth == pytest.approx(INTER.bandwidth, rel=0.05)


def test_no_other_links_have_a_smaller_huber_loss() -> None:
    """SciPy's own Huber loss, weighted by the root of the size, rises in every direction.

    Every eighth time is five times too long: such errors count linearly, also of small buffers.
    """
    for layout, backend in SHAPES:
        samples = [
            replace(sample, seconds=sample.seconds * (1 if place % 8 else 5))
            for place, sample in enumerate(times(true(layout, backend), noise=0.1))
        ]
        weights = np.sqrt([sample.work.bytes for sample in samples])
        measured = np.log([sample.seconds for sample in samples])

        def loss(intra: Link, inter: Link) -> float:
            off = np.log(fit.predict(samples, fit.bare(layout, backend, intra, inter))) - measured  # noqa: B023 - called at once
            return float(weights @ huber(0.2, off))  # noqa: B023 - called at once

        fitted = [link or INTRA for link in fit.fit_links(samples, layout, backend)]
        least = loss(*fitted)
        for place, present in enumerate((layout.gpus_per_node > 1, layout.nodes > 1)):
            for field in ("bandwidth", "latency"):
                for factor in (0.98, 1.02):
                    others = list(fitted)
                    changed = factor * getattr(others[place], field)
                    others[place] = replace(others[place], **{field: changed})
                    assert loss(*others) > least if present else loss(*others) == least


def test_the_processor_predicts_the_kernels_that_it_was_fitted_to() -> None:
    """`compute_time` of the fitted processor gives every measured kernel back, and large copies."""
    seen = measured(Layout(1, 2))
    found = fit_gpu(seen)
    assert found
    for precision, samples in seen.compute.items():
        for sample in [*samples, seen.copies[-1]]:
            again = compute_time(sample.work, found, precision)
            assert again == pytest.approx(sample.seconds, rel=1e-9)


def test_the_file_says_what_was_fitted(tmp_path: Path) -> None:
    """co2sim reads the numbers back, every one with a source; quotes in names do no harm."""
    for layout, backend in SHAPES:
        seen = measured(layout, backend)
        path = tmp_path / "probed.toml"
        path.write_text(to_toml(seen, fit.fit(seen), 'our "own" \\ cluster, Zürich'))
        loaded = load_cluster(str(path))
        found = loaded.value
        assert found.name == 'our "own" \\ cluster, Zürich'
        assert (found.layout, found.backend, found.communicators) == (layout, backend, "stream")
        assert found.interference == pytest.approx(0.25, rel=1e-3)
        assert found.host
        assert found.host.call_interference == pytest.approx(1e-3, rel=1e-3)
        busy = 1 / 1.6 if layout.nodes > 1 else 1.0
        assert found.inter.busy_efficiency == pytest.approx(busy, rel=2e-3)
        assert found.gpu.name == PROCESSOR.name
        assert found.host.one_core
        assert found.gpu.peak == pytest.approx(dict(PROCESSOR.peak), rel=1e-3)
        points = [pytest.approx(point, rel=1e-3) for point in PROCESSOR.efficiency]
        assert list(found.gpu.efficiency) == points
        for number in ("memory", "memory_bandwidth", "launch_overhead"):
            assert getattr(found.gpu, number) == pytest.approx(getattr(PROCESSOR, number), rel=1e-3)
        for link, expected, here in (
            (found.intra, INTRA, layout.gpus_per_node > 1),
            (found.inter, INTER, layout.nodes > 1),
        ):
            if here:
                assert link.payload_bandwidth == pytest.approx(expected.bandwidth, rel=2e-3)
                assert link.latency == pytest.approx(expected.latency, rel=1e-2)
        assert all(fact.source for fact in loaded.facts)


def assumed(seen: Measured, folder: Path, gpu: str | None = None) -> set[str]:
    """The numbers of the file that are marked as assumed."""
    path = folder / "probed.toml"
    path.write_text(to_toml(seen, fit.fit(seen), "probed", gpu))
    found = {fact.path for fact in load_cluster(str(path)).assumed}
    rates = {"pue", "grid_intensity", "grid_intensity_low", "grid_intensity_high"}
    return found - {"node_spread", "step_spread", *rates}  # which no probe measures


def test_what_was_not_measured_is_marked_as_assumed(tmp_path: Path) -> None:
    """One node knows no network, one rank no link at all, and --gpu no interference on a GPU."""
    intra, inter = ({f"{place}.{n}" for n in ("bandwidth", "latency")} for place in INTRA_INTER)
    assert assumed(measured(Layout(2, 2)), tmp_path) == set()
    assert assumed(measured(Layout(1, 2)), tmp_path) == inter
    assert assumed(measured(Layout(2, 1)), tmp_path) == intra
    assert assumed(measured(Layout(1, 1)), tmp_path) == intra | inter | {"interference"}
    bare = measured(Layout(2, 2), kernels=False)
    assert assumed(bare, tmp_path, "virtual") == set()
    assert "interference" in assumed(replace(bare, backend="nccl"), tmp_path, "h100")


INTRA_INTER = ("intra", "inter")


def test_calibrate_takes_a_probed_cluster_with_a_gpu_of_the_catalog(tmp_path: Path) -> None:
    """What refuses a file with measured kernels says the command whose file it takes."""
    seen = measured(Layout(2, 8), "nccl")
    path = tmp_path / "probed.toml"

    def calibrated(gpu: str | None) -> Calibrated:
        kernels = seen if gpu is None else replace(seen, compute={}, slowdowns=(), together=None)
        path.write_text(to_toml(kernels, fit.fit(kernels), "probed", gpu))
        case = Question(
            cluster=str(path), model="gpt2-small", strategy="ddp", gpus=16, micro_batch=1
        )
        return calibrate([MeasuredRun("row", case, driver.run(case).tokens_per_s_per_gpu / 2)])

    with pytest.raises(OptionError, match=r"realrun probe --gpu (?P<gpu>\w+)") as refused:
        calibrated(None)
    said = re.search(r"realrun probe --gpu (\w+)", str(refused.value))
    assert said
    found = calibrated(said[1])
    assert found.values
    assert found.last[0].tokens_per_s < found.first[0].tokens_per_s


def test_a_collective_lasts_from_its_last_start_to_its_last_end() -> None:
    """Per group and round; the first round only warms up; compute is the slowest rank's median."""
    layout = Layout(2, 2)
    kernel = Op("kernel", Compute("probe", 1.0), "compute")
    schedule = Schedule("both", (kernel, *sweep(NODE, [Kind.BROADCAST], [4]).body))
    name = schedule.body[-1].name
    ends = {0: 5.0, 1: 6.0, 2: 4.0, 3: 3.5}
    traces = [
        Trace(
            "",
            layout,
            3,
            {rank: 1},
            tuple(
                span
                for turn in range(3)
                for span in (
                    Span(rank, turn, name, "comm", 100.0 * turn + rank, 100.0 * turn + ends[rank]),
                    Span(rank, turn, "kernel", "compute", 0.0, 9.0 if turn == 0 else rank + turn),
                )
            ),
        )
        for rank in range(4)
    ]
    found = durations(traces, schedule)
    assert sorted(found[name]) == [1.0, 1.0, 5.0, 5.0]
    assert found["kernel"] == [4.5]


def test_slowdown_compares_kernels_beside_communication_with_those_alone() -> None:
    """Means; what communication covers in part does not count, and neither does the first round."""
    kernels = [(0.0, 0.8), (0.8, 1.2), (1.2, 2.7), (2.7, 3.9), (3.9, 4.5), (4.5, 5.5)]
    rows = [(f"kernel 0 {number}", *times) for number, times in enumerate(kernels)]
    rows += [("reduce 0 0", 1.0, 3.0), ("reduce 0 1", 3.0, 4.0), ("tail 0", 90.0, 91.0)]
    spans = [Span(0, 1, op, op.split()[0], start, end) for op, start, end in rows]
    spans.append(Span(0, 0, "kernel 0 0", "kernel", 0.0, 100.0))
    trace = Trace("", Layout(1, 2), 2, {0: 1}, tuple(spans))
    found = slowdown([trace])
    assert found.compute == pytest.approx(1.35 / 0.9)
    assert found.communication == pytest.approx(1.5)  # 2 s and 1 s, for 1 s alone
    assert found.seconds == pytest.approx(1.5)


def test_kernels_run_alone_and_beside_communication_in_turn() -> None:
    """Simulated on links whose cost is known: a processor that loses a third is found out."""
    reduce = Collective(Kind.ALL_REDUCE, SWEPT, 2**18, DType.FP32, WORLD)
    link = Link(2e7, 0.0)
    gpu = GPU("any", 1e9, 1e9, {"fp32": 1e9}, ((1.0, 1.0),))
    cluster = Cluster("two", gpu, 2, 1, link, link, "gloo", "stream", interference=0.5)
    schedule = overlapped(Compute("probe", 8e6), reduce, 2, 14)
    trace = execute(schedule, cluster, precision="fp32", rounds=3, fold=False)
    found = slowdown([trace])
    assert found.compute == pytest.approx(1.5, rel=0.01)
    assert found.communication == pytest.approx(1.0)
    assert found.seconds == pytest.approx(2**20 / 2e7)


def test_two_streams_are_compared_with_one_of_the_same_round() -> None:
    """From the end of the kernels alone to the last end of both streams; the median of rounds."""
    schedule = on_two_streams(Compute("probe", 1e6))
    spans = [Span(0, 0, op.name, op.stream, 0.0, 100.0) for op in schedule.body]
    for turn, length in ((1, 1.5), (2, 2.0), (3, 7.0)):  # of both, in kernels
        for op in schedule.body:
            row, _, number = op.name.partition(" ")
            start = {"meet": -5.0, "alone": 0.0, "under": 6.0, "beside": 6.0}[row]
            start += (length if row in {"under", "beside"} else 1.0) * int(number or 0)
            span = length if row in {"under", "beside"} else 1.0
            spans.append(Span(0, turn, op.name, op.stream, start, start + span))
    trace = Trace("", Layout(2, 1), 4, {0: 1}, tuple(spans))
    assert times_as_long(trace) == pytest.approx(2.0)


@given(st.floats(0.0, 0.5), st.floats(0.0, 1e-3), st.floats(0.002, 0.01), st.floats(0.05, 1.0))
def test_a_short_and_a_long_collective_tell_calls_from_bytes(
    share: float, call: float, short: float, long: float
) -> None:
    """What each took from kernels gives the share of time and the time of a call back."""
    found, each = interference([beside(short, share, call), beside(long, share, call)])
    assert found / (1 + found) == pytest.approx(share, abs=1e-9)
    assert each == pytest.approx(call, abs=1e-9)


@pytest.mark.slow
def test_the_figure_is_a_png() -> None:
    """With any number of groups, with kernels and without."""
    for layout in [Layout(1, 1), Layout(2, 2)]:
        from realrun.probe.figure import draw  # noqa: PLC0415 - matplotlib

        for kernels in (True, False):
            seen = measured(layout, kernels=kernels)
            if kernels or layout.world_size > 1:
                assert draw(seen, fit.fit(seen), "costs $5 and $6").startswith(b"\x89PNG")


@pytest.mark.dist
def test_a_probe_writes_a_cluster_that_co2sim_predicts_with(tmp_path: Path) -> None:
    """Two ranks: a file with every number measured but the network, and a figure."""
    pytest.importorskip("torch")
    options = ("--budget", "1 s", "--max-size", "64 KiB", "--out", "here.toml")
    done = realrun_on_ranks(tmp_path, 2, "probe", *options)
    assert done.returncode == 0, done.stderr
    assert "memory bandwidth" in done.stdout
    probed = load_cluster(str(tmp_path / "here.toml")).value
    assert probed.layout == Layout(1, 2)
    assert probed.gpu.peak["fp32"] > 1e8
    work = Collective(Kind.ALL_REDUCE, "b", 2**16, DType.FP32, WORLD)
    assert 1e-5 < cost_of(work, probed).duration_alone(probed) < 1
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")


# --- in a lab, whose rates are stated ------------------------------------------------------------


def test_what_hosts_add_is_found_from_small_collectives() -> None:
    """A call, a step and a byte on every link, and waking up, exactly; large ones are left out."""
    for layout in [(2, 1), (4, 1), (2, 2)]:
        for call, wake in [(0.0, 0.0), (1e-3, 0.0), (1e-3, 5e-4)]:
            intra, inter = Link(1e8, 3e-4), Link(5e7, 7e-4)
            host = HostEffects(intra=TokenBucket(1e5, 1e9), inter=TokenBucket(5e4, 1e9))
            links: dict[str, Any] = {"intra": intra, "inter": inter, "backend": "gloo"}
            true_ = tiny.cluster(*layout, **links, host=host, call_overhead=call)
            every = groups(true_.layout)
            samples = []
            for kind, size, group in itertools.product(Kind, (2**12, 2**14, 2**22), every):
                work = Collective(kind, "swept", size // 4, DType.FP32, group)
                alone = cost_of(work, true_).duration_alone(true_)
                samples.append(Sample(work, alone + wake, after="pause"))
                if passes(again := Sample(work, alone, after="equal"), true_):
                    samples.append(again)
            stated = replace(
                true_,
                call_overhead=0.0,
                intra=replace(intra, latency=1.0),
                inter=replace(inter, latency=1.0),
                host=HostEffects(intra=TokenBucket(1e5), inter=TokenBucket(5e4)),
            )
            found = fit_hosts(samples, stated)
            assert found.host
            assert found.host.inter
            assert found.call_overhead == pytest.approx(call, abs=1e-9)
            assert found.host.wake_up == pytest.approx(wake, abs=1e-9)
            assert found.inter.latency == pytest.approx(7e-4)
            assert found.host.inter.bandwidth == pytest.approx(1e9)
            assert found.intra.latency == pytest.approx(3e-4 if layout[1] > 1 else 1.0)


def test_what_is_longer_than_a_burst_tells_the_lag() -> None:
    """As a fraction of the time after the burst, 0 to 1; what passes at once says nothing."""
    for lag, found in [(0.0, 0.0), (0.1, 0.1), (1.5, 1.0), (-0.1, 0.0)]:
        for layout in [(2, 1), (4, 1)]:
            host = HostEffects(inter=TokenBucket(5e4))
            hosts = tiny.cluster(*layout, inter=Link(5e7, 7e-4), backend="gloo", host=host)
            samples = []
            for kind, size in itertools.product(Kind, (2**12, 2**20)):
                work = Collective(kind, "swept", size // 4, DType.FP32, WORLD)
                cost = cost_of(work, hosts)
                after = max(cost.link_times(hosts)) - 5e4 / 5e7
                seen = cost.duration_alone(hosts) + (lag * after if size > 2**12 else 1.0)
                samples.append(Sample(work, seen))
            fitted = fit_bursts(samples, hosts)
            assert fitted.host
            assert fitted.host.inter
            assert fitted.host.inter.lag == pytest.approx(found, abs=1e-12)
            assert replace(fitted, host=host) == hosts


def test_ranks_pause_between_meeting_and_collective_where_asked() -> None:
    """As a schedule has them: kernels before and after, and an equal one right behind."""
    kinds, sizes = [Kind.ALL_GATHER, Kind.REDUCE], [4096, 65536]
    plain = sweep(WORLD, kinds, sizes).body
    paused = sweep(WORLD, kinds, sizes, pauses=True).body
    collectives = [op for op in paused if op.stream == "comm"]
    assert [op.name for op in collectives if not op.name.endswith("again")] == [
        op.name for op in plain
    ]
    assert [op.work for op in paused if op.stream == "compute"] == [PAUSE, USE, USE] * 4
    for first, second in zip(collectives[1::3], collectives[2::3], strict=True):
        assert first.work == second.work
        assert [before(op.name, pauses=True) for op in (first, second)] == ["pause", "equal"]
        assert before(first.name, pauses=False) == "meeting"
