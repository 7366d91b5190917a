"""Traces: the rules that they are held to, and the files that they become."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from co2sim.schedule.schedule import WORLD, Collective, DType, Kind, Layout, Op, Schedule
from co2sim.simulation.noise import Noise
from co2sim.simulation.run import execute
from co2sim.simulation.trace import Span, Trace, read_json_lines


def correct(strategy: str = "co2.published(tau=1,worker=node)") -> tuple[Schedule, Trace]:
    """A correct trace of two classes of ranks over three rounds."""
    schedule = tiny.schedule(strategy)
    noise = Noise(node_speed={1: 0.5})
    return schedule, execute(schedule, tiny.cluster(), precision="bf16", rounds=3, noise=noise)


def test_the_grid_of_a_trace_has_every_span_in_its_place() -> None:
    """By round, op and rank: from arrays or from spans in any order; NaN where one is missing."""
    schedule, trace = correct()
    listed = replace(trace, spans=tuple(trace.spans)[::-1])
    for quick, slow in zip(trace.grid(schedule), listed.grid(schedule), strict=True):
        np.testing.assert_array_equal(quick, slow)
    names, ranks = [op.name for op in schedule.body], list(trace.ranks)
    for span in trace.spans:
        where = span.round, names.index(span.op), ranks.index(span.rank)
        assert (trace.grid(schedule).starts[where], trace.grid(schedule).ends[where]) == span[4:]
    without = replace(trace, spans=tuple(trace.spans)[1:]).grid(schedule)
    assert np.isnan(without.starts).sum() == np.isnan(without.ends).sum() == 1


def test_ops_that_are_missing_doubled_or_unknown_are_found() -> None:
    """Every op runs once in every round on every rank, and nothing else does."""
    schedule, trace = correct()
    outer = tiny.by_op(trace)[1, "outer"]
    without = tuple(s for s in trace.spans if (s.rank, s.round, s.op) != (0, 1, "outer"))
    found = replace(trace, spans=without).violations(schedule)
    assert found == ["rank 0 did not run 'outer' in round 1"]
    found = replace(trace, spans=(*trace.spans, outer)).violations(schedule)
    assert "rank 0 ran 'outer' twice in round 1" in found
    for stray in (outer._replace(op="extra"), outer._replace(rank=9), outer._replace(round=3)):
        (line,) = replace(trace, spans=(*trace.spans, stray)).violations(schedule)
        assert line.startswith("1 spans")


@pytest.mark.parametrize(
    ("op", "change", "said"),
    [
        ("outer", lambda span: {"end": span.start - 1e-3}, "'outer' of round 1 ends before"),
        ("outer", lambda _: {"stream": "comm"}, ""),
        (
            "average",
            lambda span: {"start": span.start - 1e-9},
            "rank 0: 'average' of round 1 starts before 'outer' has finished",
        ),
        (
            "publish",
            lambda span: {"end": span.end + 1e-9},
            "rank 0: 'forward.embedding' of round 2 starts before 'publish' has finished",
        ),
    ],
    ids=["time", "stream", "wait", "wait for a round ago"],
)
def test_a_span_that_breaks_a_rule_is_found(
    op: str, change: Callable[[Span], dict[str, Any]], said: str
) -> None:
    """Time runs forward, an op is on its stream, and waits hold, also for rounds ago."""
    schedule, trace = correct()
    span = tiny.by_op(trace)[1, op]
    spans = [other._replace(**change(span)) if other == span else other for other in trace.spans]
    found = replace(trace, spans=tuple(spans)).violations(schedule)
    assert any(said in line for line in found)


@pytest.mark.parametrize(
    ("kind", "root", "times", "early"),
    [
        (Kind.ALL_REDUCE, 0, [(0.0, 1.0), (2.0, 3.0)], (0, 1)),
        (Kind.BROADCAST, 0, [(0.0, 1.0), (2.0, 3.0)], None),  # who sends may leave
        (Kind.BROADCAST, 0, [(2.0, 3.0), (0.0, 1.0)], (1, 0)),
        (Kind.REDUCE, 0, [(2.0, 3.0), (0.0, 1.0)], None),
        (Kind.REDUCE, 0, [(0.0, 1.0), (2.0, 3.0)], (0, 1)),
        (Kind.REDUCE, 1, [(0.0, 1.0), (2.0, 3.0)], None),
        (Kind.REDUCE, 1, [(2.0, 3.0), (0.0, 1.0)], (1, 0)),
    ],
)
def test_on_a_real_network_only_who_sends_leaves_before_all_have_come(
    kind: Kind, root: int, times: list[tuple[float, float]], early: tuple[int, int] | None
) -> None:
    """Whatever `skew` forgives; a tolerance forgives that."""
    work = Collective(kind, "x", 10, DType.FP32, WORLD, root=root)
    schedule = Schedule("one", (Op("op", work, "comm"),))
    spans = tuple(Span(rank, 0, "op", "comm", *time) for rank, time in enumerate(times))
    trace = Trace("one", Layout(2, 1), 1, {0: 1, 1: 1}, spans)
    found = trace.violations(schedule, skew=float("inf"))
    assert [line.split("round 0 ")[1] for line in found] == (
        [f"ends on rank {early[0]} 1 s before rank {early[1]} has come"] if early else []
    )
    assert trace.violations(schedule, tolerance=1.5, skew=float("inf")) == []


def test_json_lines_read_back_as_the_same_trace(tmp_path: Path) -> None:
    """Writing and reading a trace changes no bit of it."""
    _, trace = correct()
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(trace.to_json_lines()))
    assert read_json_lines(path) == trace
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


def test_perfetto_gets_every_span_with_its_bytes_and_round() -> None:
    """Complete events in microseconds, named by op, on the op's track, without overlaps."""
    schedule, trace = correct()
    chrome: Any = json.loads(json.dumps(trace.to_chrome(schedule)))
    meta = [event for event in chrome["traceEvents"] if event["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    assert {rank: name.split(" (")[0] for rank, name in processes.items()} == {
        0: "rank 0",
        2: "rank 2",
    }
    tracks = {(e["pid"], e["args"]["name"]): e["tid"] for e in meta if e["name"] == "thread_name"}
    assert set(tracks) == {(r, s) for r in processes for s in ("compute", "comm", "outer")}
    assert len({(pid, tid) for (pid, _), tid in tracks.items()}) == len(tracks)
    events = [event for event in chrome["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(trace.spans)
    reached: dict[tuple[int, int], float] = {}
    for event, span in zip(events, trace.spans, strict=True):
        assert (event["name"], event["pid"]) == (span.op, span.rank)
        assert event["tid"] == tracks[span.rank, span.stream]
        assert event["ts"] == pytest.approx(span.start * 1e6)
        assert event["dur"] == pytest.approx((span.end - span.start) * 1e6)
        assert event["args"]["round"] == span.round
        track = (event["pid"], event["tid"])
        assert event["ts"] >= reached.get(track, 0.0) - 1e-9
        reached[track] = event["ts"] + event["dur"]
    arguments = {event["name"]: event["args"] for event in events}
    assert arguments["average"]["bytes"] == 4000  # fp32, half of 2000 parameters
    assert arguments["average"]["kind"] == "all_reduce"
    assert arguments["average"]["group"] == "peers"
    assert arguments["forward.layer0"]["flops"] == 2e6
