"""Charts for notebooks: valid, small, and they say what the simulator says; the example runs."""

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest
import tiny
from places import ROOT

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

import vl_convert
from one_sample import simulate

import co2sim
from co2sim import OptionError, Question
from co2sim.prediction import driver
from co2sim.report import rounds
from co2sim.report.charts import parts
from co2sim.schedule.schedule import Compute, Op, Schedule
from co2sim.simulation import metrics
from co2sim.simulation.trace import Trace
from co2sim.training.memory import GIB

EXAMPLE = ROOT / "examples" / "what_if.ipynb"
GPT = ("a100-tcp80", "gpt2-small")
MOST = 500_000
"""Characters of a chart."""


def traced(strategy: str, **options: Any) -> tuple[Schedule, Trace]:
    """A small model on two nodes."""
    return driver.trace(driver.make_case(*GPT, strategy, gpus=16, **options))


def checked(chart: Any, *, draw: bool = False) -> dict[str, Any]:
    """The specification: Vega-Lite's schema allows it, on white, in few bytes; Vega may draw it."""
    found: dict[str, Any] = chart.to_dict()  # which validates
    text = json.dumps(found)
    assert len(text) < MOST
    assert "currentColor" not in text
    assert found["config"]["background"] == "white"
    assert not draw or vl_convert.vegalite_to_svg(found).startswith("<svg")
    return found


def rows_with(spec: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The rows of all data of a chart that have some key."""
    return [row for rows in spec["datasets"].values() for row in rows if key in row]


def marks(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The layers of a chart, each by its mark."""
    for layer in spec.get("layer", [spec]):
        yield layer["mark"]["type"], layer


# --- a result -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    ["ddp", pytest.param("co2(tau=4, delay=1, worker=node)", marks=pytest.mark.nightly)],
)
def test_a_result_draws_its_round_and_its_memory(strategy: str) -> None:
    """The bars are the shares of the round, and the items of memory, which sum to the total."""
    result = simulate(*GPT, strategy, gpus=16)
    spec = checked(co2sim.plot(result))
    shares = {row["part"]: row["share"] for row in rows_with(spec, "part")}
    assert shares == {part: share for part, share in parts(result).items() if share}
    memory = rows_with(spec, "item")
    total = result.memory_bytes_per_gpu["total"] / GIB
    assert sum(row["size"] for row in memory) == pytest.approx(total)


@pytest.mark.nightly
def test_vega_draws_every_kind_of_chart(sizes: pd.DataFrame, swept: pd.DataFrame) -> None:
    """Of results, traces, schedules and tables with lines, places, bars and points."""
    result = simulate(*GPT, "co2(tau=4, delay=1, worker=node)", gpus=16)
    schedule, trace = traced("zero3")
    names = co2sim.sweep("dgx-h100", "llama-7b", gpus=16, vary={"strategy": "ddp, zero3"})
    checked(co2sim.plot(result), draw=True)
    checked(co2sim.plot(trace, schedule=schedule), draw=True)
    checked(co2sim.plot(schedule, first=500), draw=True)
    for frame, options in (
        *((sizes, {}), (sizes.head(1), {}), (names, {})),
        *((swept, {"y": "cost"}), (swept, {"y": "cost", "x": "days"})),
    ):
        checked(co2sim.plot(frame, **options), draw=True)


# --- a trace --------------------------------------------------------------------------------------


def test_a_trace_draws_the_last_round_of_a_rank() -> None:
    """The bars take as long as the spans of that rank do; those of a slower node take longer."""
    schedule, trace = traced("ddp", node_speed={1: 0.5}, fold=False)
    during = metrics.window(trace, schedule, 1)
    computed = {}
    for rank in (0, 8):
        spec = checked(co2sim.plot(trace, schedule=schedule, rank=rank))
        bars = rows_with(spec, "kind")
        computed[rank] = sum(bar["length"] for bar in bars if bar["stream"] == "compute")
        assert f"rank {rank}" in spec["title"]["subtitle"][0]
        taken = sum(
            max(0.0, min(span.end, during.end) - max(span.start, during.start))
            for span in trace.spans
            if (span.rank, span.stream) == (rank, "compute")
        )
        assert computed[rank] == pytest.approx(1e3 * taken, rel=0.01)
    assert computed[8] > 1.2 * computed[0]
    folded = traced("ddp")
    shown = checked(co2sim.plot(folded[1], schedule=folded[0]))
    assert "stands for 16 equal ranks" in shown["title"]["subtitle"][0]
    assert len(rows_with(shown, "kind")) == len(rounds.round_of(*folded, parts=600).bars)


def test_a_trace_refuses_other_ranks_and_schedules() -> None:
    """With what there is."""
    schedule, trace = traced("ddp")
    with pytest.raises(OptionError, match="rank is 5"):
        co2sim.plot(trace, schedule=schedule, rank=5)
    other = Schedule("other", (Op("a", Compute("k", 1.0), "s"),))
    with pytest.raises(OptionError, match=r"'ddp'.* 'other'"):
        co2sim.plot(trace, schedule=other)


# --- a schedule -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "co2(tau=2,delay=1,worker=node,inner=zero3)",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in tiny.VARIANTS[1::7]),
    ],
)
def test_a_schedule_draws_every_op_and_every_wait(strategy: str) -> None:
    """Points stand for all ops; lines are the waits between streams, dashed for earlier rounds."""
    case = Question(cluster=tiny.cluster(), model=tiny.model(), strategy=strategy)
    schedule = case.stage().schedule
    spec = checked(co2sim.plot(schedule, first=500))
    points = rows_with(spec, "work")
    streams = {op.name: op.stream for op in schedule.body}
    waits = [
        (wait.rounds_ago > 0)
        for op in schedule.body
        for wait in op.after
        if streams[wait.op] != op.stream
    ]
    drawn = [row["earlier"] for row in rows_with(spec, "earlier")]
    assert sorted(drawn) == sorted(waits)
    assert {row["stream"] for row in points} == set(schedule.streams)
    counts = [
        1 + int(row["op"].split(" and ")[1].split()[0]) for row in points if " and " in row["op"]
    ]
    assert sum(counts) + sum(" and " not in row["op"] for row in points) == len(schedule.body)
    assert f"The {len(schedule.body)} op" in spec["title"]["subtitle"][0]


def test_a_schedule_shows_as_many_ops_as_asked_for() -> None:
    """And counts the waits for those further down."""
    schedule = traced("zero3")[0]
    spec = checked(co2sim.plot(schedule, first=2))
    assert len(rows_with(spec, "work")) == 2
    assert f"2 of {len(schedule.body)} ops" in spec["title"]["subtitle"][0]
    for wrong in (0, 501, 2.5):
        with pytest.raises(OptionError, match="first is"):
            co2sim.plot(schedule, first=wrong)  # type: ignore[arg-type]


# --- a table --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sizes() -> pd.DataFrame:
    """Two strategies over two sizes."""
    return co2sim.scale(*GPT, ["ddp", "zero3"], gpus=[8, 16])


@pytest.fixture(scope="module")
def swept() -> pd.DataFrame:
    """Two strategies over bandwidths, sorted by speed, with what a training takes."""
    return co2sim.sweep(
        *GPT,
        gpus=16,
        vary={
            "strategy": ["ddp", "co2.published(tau=4)"],
            "inter.bandwidth": ["1 Tbit/s", "25 Gbit/s", "800 Mbit/s"],
        },
        tokens=1e9,
        overrides={"price_per_gpu": "2 USD/h"},
        sort="tokens_per_s",
    )


def drawn(spec: dict[str, Any]) -> set[tuple[str, Any, float]]:
    """What points and bars show: the line, the place and the value."""
    return {(row["strategy"], row["at"], row["value"]) for row in rows_with(spec, "at")}


def test_a_table_of_sizes_is_a_line_for_each_strategy(sizes: pd.DataFrame) -> None:
    """Over GPUs; the bands are the 90 % intervals of the table."""
    spec = checked(co2sim.plot(sizes))
    columns = zip(sizes["strategy"], sizes["gpus"], sizes["tokens_per_s"], strict=True)
    assert drawn(spec) == set(columns)
    ends = {(row["low"], row["high"]) for row in rows_with(spec, "low")}
    assert ends == set(zip(sizes["tokens_per_s_low"], sizes["tokens_per_s_high"], strict=True))
    assert {mark for mark, _ in marks(spec)} == {"area", "line", "point"}
    assert spec["title"]["text"] == "tokens/s"
    assert "Bands are 90 % intervals." in spec["title"]["subtitle"]


def test_options_of_a_strategy_are_places_not_lines() -> None:
    """Every tau is a strategy of its own in the table; in the chart they are one line."""
    found = co2sim.sweep(*GPT, "co2", gpus=16, vary={"strategy.tau": [12, 1, 4]})
    spec = checked(co2sim.plot(found))
    assert {(name, at) for name, at, _ in drawn(spec)} == {
        ("co2", "1"),
        ("co2", "4"),
        ("co2", "12"),
    }
    assert next(marks(spec))[1]["encoding"]["x"]["sort"] == ["1", "4", "12"]


def test_columns_may_be_chosen(swept: pd.DataFrame) -> None:
    """Money against days: points, which no line joins."""
    spec = checked(co2sim.plot(swept, "cost", x="days"))
    assert {(at, value) for _, at, value in drawn(spec)} == set(
        zip(swept["days"], swept["cost"], strict=True)
    )
    assert "line" not in {mark for mark, _ in marks(spec)}


def test_rows_without_a_figure_are_left_out_and_counted() -> None:
    """Those that failed have no throughput."""
    found = co2sim.sweep(*GPT, "ddp", vary={"gpus": [8, 16, 12]})
    assert found["error"].notna().sum() == 1
    spec = checked(co2sim.plot(found))
    assert {at for _, at, _ in drawn(spec)} == {8, 16}
    assert "1 row without this figure left out." in spec["title"]["subtitle"]


def test_a_single_row_is_a_chart(sizes: pd.DataFrame) -> None:
    """And so are some columns of a table."""
    checked(co2sim.plot(sizes.head(1)))
    few = sizes[["strategy", "gpus", "mfu"]]
    assert len(drawn(checked(co2sim.plot(few, "mfu")))) == 4


def test_what_is_no_chart_is_refused_in_words(sizes: pd.DataFrame) -> None:
    """With what was given, and what would do."""
    with pytest.raises(OptionError, match="'tokens_per_s'"):
        co2sim.plot(sizes, "tokens_per_sec")
    with pytest.raises(OptionError, match="'gpus'"):
        co2sim.plot(sizes, x="gpu")
    for column in ("strategy", "fits_in_memory"):
        with pytest.raises(OptionError, match=f"'{column}'"):
            co2sim.plot(sizes, column)
    with pytest.raises(OptionError, match="'cost_per"):
        co2sim.plot(sizes.assign(cost_per_billion_tokens=None), "cost_per_billion_tokens")
    with pytest.raises(OptionError, match="Result"):
        co2sim.plot([1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"8,000.* 5,000"):
        co2sim.plot(pd.concat([sizes] * 2000))


# --- the example ----------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_example_runs_and_its_claims_hold() -> None:
    """Every claim is an assert in a cell; every question shows a table or a picture."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    book = nbformat.read(EXAMPLE, as_version=4)
    where = {"metadata": {"path": str(EXAMPLE.parent)}}
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=where).execute()
    first, *cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert not first.outputs
    for cell in cells:
        assert "assert" in cell.source or cell.source == "co2sim.plot(today)"
        (output,) = cell.outputs  # and no warning on stderr
        shown = output["data"]
        assert {"text/html", "image/svg+xml"} & set(shown)
        assert sum(len(text) for text in shown.values()) < MOST
