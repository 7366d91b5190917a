"""The page of `co2sim report`: one file that says what the simulator said, and loads nothing."""

import io
import json
import math
from dataclasses import replace
from html import unescape
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from html_pages import drawn_points, files, first_screen, heading, held, loads, policy_of

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from commands import written
from one_sample import simulate

from co2sim.prediction.driver import run
from co2sim.prediction.evidence import nearest
from co2sim.prediction.question import Question
from co2sim.prediction.step_factors import NO_GOAL
from co2sim.prediction.step_memory import StepMemory
from co2sim.report import bundle, charts, rounds, sections
from co2sim.report.study_page import Study
from co2sim.report.text.cases import over_gpus
from co2sim.report.text.memory import savings
from co2sim.studies.grid import over_sizes
from co2sim.training.memory import GIB

PRICED = {"price_per_gpu": "2 USD/h"}
STRATEGIES = ["ddp", "zero3", "co2:tau=4,delay=1,worker=node"]
REPORT = (
    *("report", "-c", "a100-tcp80", "-m", "gpt2-small", "-g", "8,16", "--tokens", "1e9"),
    *(word for strategy in STRATEGIES for word in ("-s", strategy)),
    *("--set", "price_per_gpu=2 USD/h"),
    *("--micro-batch", "1", "--accumulation", "1"),
)


def study_of(
    clusters: list[str] | None = None,
    tokens: float | None = None,
    strategies: list[str] = STRATEGIES,
    **changes: Any,
) -> Study:
    """A small study of three strategies on one and two nodes."""
    job = Question(cluster="", model="gpt2-small", strategy="", **changes)
    cases = over_sizes(job, clusters or ["a100-tcp80"], strategies, "8,16")
    results = [run(case) for case in cases]
    return Study(
        cases=cases,
        results=results,
        screen=over_gpus(cases, results, NO_GOAL, tokens),
        goal=NO_GOAL,
        tokens=tokens,
        comparisons=(),
        command="co2sim report ...",
    )


@pytest.fixture
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page about training 1e9 tokens."""
    return written(tmp_path_factory, *REPORT).text


def test_the_heading_has_days_and_money_and_the_first_screen_every_line(text: str) -> None:
    """The best trade with its range; model, tokens and cluster; what the terminal says besides."""
    study = study_of(tokens=1e9, overrides=PRICED)
    best = study.best.totals
    fitting = [one.totals for one in study.all if one.totals and one.result.fits_in_memory]
    assert best == min(fitting, key=lambda one: one.days * (one.cost or 0))
    minutes = (1440 * days for days in (best.days, best.days_low, best.days_high))
    assert all(f"{each:.3g}" in heading(text) for each in minutes)
    assert heading(text) in unescape(text.partition("<title>")[2]).replace("\xa0", " ")
    shown = first_screen(text)
    assert all(name in shown for name in (study.best.result.model, "1B tokens"))
    (near,) = nearest(study.best.case, study.best.result, 1)
    assert f"{near.run.published:,.0f}" in shown
    assert all(f"<dt>{name}</dt>" in shown for name, _ in study.screen.rows if name)


def test_the_chart_is_between_what_decides_and_the_table(text: str) -> None:
    """One chart in the head of the page, drawn nowhere else, before how it was asked."""
    head, _, body = text.partition("</header>")
    assert head.count("data-chart=") == 1
    assert 'data-chart="money-0"' not in body
    parts = ["<h1>", "<dt>cost</dt>", "<dt>counted</dt>", 'data-chart="money-0"', "<dt>batch</dt>"]
    parts.append(f'<th scope="col">{study_of(tokens=1e9).screen.columns[0]}</th>')
    places = [head.rindex(part) for part in parts]
    assert places == sorted(places)


def test_a_colour_stands_for_one_thing(text: str) -> None:
    """Those of strategies, of what a round is spent on, and of memory have none in common."""
    specs = held(text, "specs")
    groups = [colours(specs[key]) for key in ("speed-0", "time-0", "memory-0")]
    assert all(groups)
    assert all(not one & other for one, other in combinations(groups, 2))
    assert colours(specs["money-0"]) == groups[0]


def colours(spec: Any) -> set[str]:
    """All in the colour scales of a chart."""
    if isinstance(spec, dict):
        own = spec.get("color") if isinstance(spec.get("color"), dict) else {}
        return set(own.get("scale", {}).get("range", ())).union(*map(colours, spec.values()))
    return set().union(*map(colours, spec)) if isinstance(spec, list) else set()


def test_the_data_inside_is_what_the_simulator_says(text: str) -> None:
    """CSV and JSON hold every case; the points of the chart are their throughputs."""
    inside = files(text)
    rows = json.loads(inside["study.json"])
    frame = pd.read_csv(io.BytesIO(inside["study.csv"]))
    assert len(rows) == len(frame) == 6
    for row, (_, line) in zip(rows, frame.iterrows(), strict=True):
        found = simulate("a100-tcp80", "gpt2-small", row["strategy"], gpus=row["gpus"])
        assert row["tokens_per_s"] == pytest.approx(found.tokens_per_s)
        assert line["tokens_per_s"] == pytest.approx(found.tokens_per_s)
    spec = held(text, "specs")["speed-0"]
    drawn = {(point["gpus"], point["value"]) for point in drawn_points(spec)}
    assert drawn == {(row["gpus"], row["tokens_per_s"]) for row in rows}


def test_nothing_is_loaded_and_only_its_own_scripts_may_run(text: str) -> None:
    """The policy names the hash of each script, and allows no other source of anything."""
    policy, hashes = policy_of(text)
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert len(hashes) == 2
    assert all(digest in policy for digest in hashes)
    assert not loads(text)


@pytest.mark.parametrize("strategy", ["zero3", "diloco:tau=50,fragments=4,delay=3"])
def test_a_timeline_holds_the_round_in_few_bars(strategy: str) -> None:
    """Bars lie in the round, in order on each stream; together they are the spans of a rank."""
    alone = {"interference": "0", "node_spread": "0"}
    case = Question(
        cluster="a100-tcp80", model="gpt2-small", strategy=strategy, gpus=16, overrides=alone
    )
    shown, result = rounds.last_round(case), run(case)
    assert shown.length == pytest.approx(1e3 * result.round_time_s)
    assert len(shown.bars) <= 4 * 1500
    computed = 0.0
    for stream in {bar.stream for bar in shown.bars}:
        own = [bar for bar in shown.bars if bar.stream == stream]
        for before, after in pairwise(own):
            assert before.end <= after.start + 1e-9
        computed += sum(bar.end - bar.start for bar in own) if stream == "compute" else 0.0
    assert all(0 <= bar.start <= bar.end <= shown.length * (1 + 1e-12) for bar in shown.bars)
    exposed = 1e3 * result.exposed_comm_s
    assert computed == pytest.approx(shown.length - exposed, rel=0.01)


def test_shares_of_a_round_sum_to_one() -> None:
    """Computing alone, computing with communication behind it, exposed, and slower ranks."""
    for one in study_of().all:
        shares = charts.parts(one.result)
        assert sum(shares.values()) == pytest.approx(1)
        assert all(share >= 0 for share in shares.values())
        assert shares["exposed communication"] == pytest.approx(one.result.exposed_share)
        hidden = one.result.comm_busy_s - one.result.exposed_comm_s
        assert list(shares.values())[1] == pytest.approx(hidden / one.result.round_time_s)


def test_bars_of_memory_are_the_items_of_a_gpu(text: str) -> None:
    """Together they are its total, which is no bar."""
    spec = held(text, "specs")["memory-0"]
    (group,) = study_of(tokens=1e9, overrides=PRICED).largest.values()
    for one in group:
        sizes = [row["size"] for row in drawn_points(spec) if row.get("strategy") == one.strategy]
        total = one.result.memory_bytes_per_gpu["total"] / GIB
        assert sum(sizes) == pytest.approx(total)


def test_of_two_clusters_a_line_says_how_much_faster_one_is() -> None:
    """With the range of the ratio, as if their errors had nothing in common."""
    study = study_of(
        ["a100-tcp80", "a100-roce800"],
        strategies=["ddp", "zero3"],
        overrides={"stack.call_overhead": "0 us", "model.seq_len": "128"},
    )
    slow, fast = (
        max(study.largest[name], key=lambda one: one.result.tokens_per_s).result
        for name in ("a100-tcp80", "a100-roce800")
    )
    ratio = fast.tokens_per_s / slow.tokens_per_s
    assert ratio > 2
    reach = math.hypot(
        *(math.log(r.tokens_per_s_high / r.tokens_per_s_low) / 2 for r in (slow, fast))
    )
    said = dict(study.screen.rows)["between"]
    assert said.index("a100-roce800") < said.index("a100-tcp80")
    low, high = (ratio * math.exp(sign * reach) for sign in (-1, 1))
    assert all(shown in said for shown in (f"{ratio:.3g} times", f"{low:.2g} to {high:.2g}"))
    assert "not known" not in said


@pytest.mark.parametrize("other", ["a100-roce800", "a100-tcp80"])
def test_of_two_clusters_that_are_nearly_alike_the_order_is_not_known(other: str) -> None:
    """Where the range of the ratio has 1 inside, and where a number changes nothing."""
    job = Question(cluster="", model="gpt2-small", strategy="", micro_batch=16)
    pairs = [("one", "a100-tcp80"), ("other", other)]
    cases = [case for _, name in pairs for case in over_sizes(job, [name], ["ddp"], "16")]
    panels = [f"{case.cluster}, {name}" for case, (name, _) in zip(cases, pairs, strict=True)]
    screen = over_gpus(cases, [run(case) for case in cases], panels=panels)
    assert "not known" in dict(screen.rows)["between"]


def test_the_table_of_a_page_has_every_number_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is too narrow for all has fewer."""
    monkeypatch.setenv("COLUMNS", "60")
    sizes = ["8", "16", "32", "64", "128"]
    job = Question(cluster="", model="gpt2-small", strategy="")
    cases = over_sizes(job, ["a100-tcp80"], ["zero2"], ",".join(sizes))
    results = [run(case) for case in cases]
    narrow, whole = (over_gpus(cases, results, whole=whole).columns for whole in (False, True))
    assert set(sizes) - set(narrow)
    assert not set(sizes) - set(whole)


def test_without_prices_days_are_drawn_over_gpus() -> None:
    """Those of the totals, with their intervals; with prices money is drawn over days instead."""
    study = study_of(["a800-1600g"], tokens=1e9)
    figure, *others = sections.money(study.all, STRATEGIES).figures
    assert others == []
    assert figure.chart
    points = drawn_points(dict(figure.chart))
    expected = {(o.strategy, o.result.gpus, o.totals.days) for o in study.all if o.totals}
    assert {(row["strategy"], row["gpus"], row["value"]) for row in points} == expected


def test_the_bundle_is_kept_for_the_next_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the user's cache; where that cannot be written it is made again."""
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda _: "made once</script>")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundle.vega() == "made once<\\/script>"
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda _: "made twice")
    assert bundle.vega() == "made once<\\/script>"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert bundle.vega() == "made twice"


@pytest.mark.parametrize(
    "more", [{"recompute": "none"}, {"recompute": "full/2"}, {"pp": 2, "accumulation": 4}]
)
def test_the_memory_over_a_step_is_drawn_as_it_is(more: dict[str, Any]) -> None:
    """Lines through the moments that are drawn pass through all the others, for every item."""
    case = Question(cluster="dgx-h100", model="gpt2-small", strategy="fsdp", gpus=16, **more)
    memory = StepMemory.of(case, run(case))
    line = memory.line
    drawn: dict[str, list[tuple[int, float]]] = {}
    for point in drawn_points(charts.step_memory(memory)):
        if "item" in point:
            drawn.setdefault(point["item"], []).append((point["moment"], point["size"] * GIB))
    assert set(drawn) == {*line.items, *memory.beside}
    for name, sizes in line.items.items():
        moments, shown = zip(*drawn[name], strict=True)
        between = np.interp(range(len(line.moments)), moments, shown)
        assert between == pytest.approx(sizes, abs=1e-3 * GIB)


def test_equal_layers_are_drawn_once() -> None:
    """A picture of twice the layers has as many moments."""
    counts = []
    for layers in ("12", "24"):
        case = Question(cluster="dgx-h100", model="gpt2-small", strategy="fsdp", gpus=8)
        case = replace(case, overrides={"model.layers": layers})
        memory = StepMemory.of(case, run(case))
        counts.append((len(memory.line.moments), len(memory.line.bends)))
    (few, drawn), (many, again) = counts
    assert many > few > drawn == again


def test_a_page_says_what_would_save_memory(text: str) -> None:
    """Every option and size of the terminal, for the case of the answer."""
    best = study_of(tokens=1e9, overrides=PRICED, accumulation=1).best
    rows = savings(StepMemory.of(best.case, best.result))
    assert rows
    section = unescape(text.partition('id="memory"')[2].partition("</section>")[0])
    assert all(cell in section for row in rows for cell in row)


def test_every_item_of_memory_has_its_colour_and_its_words() -> None:
    """No two items of a picture look alike; each is in the tables of how memory is counted."""
    words = (Path(__file__).parents[3] / "docs" / "how-it-works.md").read_text("utf-8")
    for strategy, stack in (("ddp", "huggingface"), ("fsdp", "nanotron"), ("zeropp", "torchtitan")):
        for recompute in ("none", "full"):
            about = {"strategy": strategy, "stack": stack, "recompute": recompute}
            case = Question(cluster="dgx-h100", model="gpt2-small", gpus=16, **about)
            memory = StepMemory(case, case)
            spec = charts.step_memory(memory)
            assert len(colours(spec)) == len(set(memory.line.items) | set(memory.beside))
            for name in {*memory.line.items, *memory.beside}:
                assert f"`{name}`" in words
