"""The page of `co2sim report`: one file that says what the simulator said, and loads nothing."""

import base64
import hashlib
import html
import io
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from commands import Command, in_process

from co2sim import simulate
from co2sim.case import Case
from co2sim.cli import main
from co2sim.grid import over_sizes
from co2sim.report import bar_charts, bundle, comparison, page, rounds, sections, study_page
from co2sim.report.answered import Answered
from co2sim.report.study import Study
from co2sim.step_factors import NO_GOAL, remark
from co2sim.study import run

PRICED = {"price_per_gpu": "2 USD/h"}
STRATEGIES = ["ddp", "zero3", "co2:tau=4,delay=1,worker=node"]


def study_of(
    clusters: list[str] | None = None, tokens: float | None = None, **changes: Any
) -> Study:
    """A small study of three strategies on one and two nodes."""
    job = Case(cluster="", model="gpt2-small", strategy="", **changes)
    cases = over_sizes(job, clusters or ["a100-tcp80"], STRATEGIES, "8,16")
    return Study(
        cases=cases,
        results=[run(case) for case in cases],
        goal=NO_GOAL,
        tokens=tokens,
        comparisons=(),
        command="co2sim report ...",
    )


def rendered(study: Study) -> bytes:
    """The page of a study."""
    return page.render(study_page.page(study))


@pytest.fixture(scope="module")
def text() -> str:
    """A page about training 1e9 tokens."""
    return rendered(study_of(tokens=1e9, overrides=PRICED)).decode()


def held(text: str, name: str) -> Any:
    """Data that a page holds for its script."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def test_the_first_heading_is_the_answer_with_its_interval(text: str) -> None:
    """Days and money of the cheapest case, as `co2sim scale --tokens` says them."""
    heading = re.search(r"<h1>(.*?)</h1>", text)
    assert heading
    words = html.unescape(heading[1])
    study = study_of(tokens=1e9, overrides=PRICED)
    best = study.best.totals
    assert best is not None
    costs = [one.totals.cost for one in study.all if one.totals and one.result.fits_in_memory]
    assert best.cost == min(cost for cost in costs if cost is not None)
    assert f"{best.days:.3g} days (90 %: {best.days_low:.3g} to {best.days_high:.3g})" in words
    assert words in html.unescape(text.partition("<title>")[2].partition("</title>")[0])


def test_the_data_inside_is_what_the_simulator_says(text: str) -> None:
    """CSV and JSON hold every case; the points of the chart are their throughputs."""
    links = dict(re.findall(r'download="([^"]+)" href="data:[^;]+;base64,([^"]+)"', text))
    rows = json.loads(base64.b64decode(links["study.json"]))
    frame = pd.read_csv(io.BytesIO(base64.b64decode(links["study.csv"])))
    assert len(rows) == len(frame) == 6
    for row, (_, line) in zip(rows, frame.iterrows(), strict=True):
        found = simulate("a100-tcp80", "gpt2-small", row["strategy"], gpus=row["gpus"])
        assert row["tokens_per_s"] == pytest.approx(found.tokens_per_s)
        assert line["tokens_per_s"] == pytest.approx(found.tokens_per_s)
    spec = held(text, "specs")["speed-0"]
    drawn = {(point["gpus"], point["value"]) for point in drawn_points(spec)}
    assert drawn == {(row["gpus"], row["tokens_per_s"]) for row in rows}


def drawn_points(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of all layers of a chart."""
    names = [(layer.get("data") or spec["data"])["name"] for layer in spec["layer"]]
    return [point for name in names for point in spec["datasets"][name]]


def test_nothing_is_loaded_and_only_its_own_scripts_may_run(text: str) -> None:
    """The policy names the hash of each script, and allows no other source of anything."""
    policy = html.unescape(re.search(r'Security-Policy" content="([^"]+)"', text)[1])  # type: ignore[index]
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    outside = text
    for script in scripts:
        outside = outside.replace(script, "")
    assert not re.search(r'(?:src|href)="(?!data:|#)', outside)
    assert "@import" not in outside


def test_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    """A cluster called like a script, and umlauts, quotes and 200 characters."""
    evil = "<script>alert(1)</script>"
    path = tmp_path / 'a "b" & ü.toml'
    source = Path("co2sim/catalog/clusters/a100-tcp80.toml").read_text("utf-8")
    named = re.sub(
        r"^name = .*$", f'name = "{evil} {"ü" * 200}"', source, count=1, flags=re.MULTILINE
    )
    path.write_text(named, "utf-8")
    made = rendered(study_of([str(path)])).decode()
    assert evil not in made
    assert html.escape(evil) in made
    assert "ü" * 200 in made
    assert held(made, "rounds")  # no name ends the data


def test_a_page_is_small(text: str) -> None:
    """At most 2 MB beside the bundle of Vega, which takes 0.9."""
    assert len(text.encode()) - len(bundle.vega().encode()) < 2e6


@pytest.mark.parametrize("strategy", [*STRATEGIES, "diloco:tau=50,fragments=4,delay=3"])
def test_a_timeline_holds_the_round_in_few_bars(strategy: str) -> None:
    """Bars lie in the round, in order on each stream; together they are the spans of a rank."""
    case = Case(cluster="a100-tcp80", model="gpt2-small", strategy=strategy, gpus=16)
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
        shares = bar_charts.parts(one.result)
        assert sum(shares.values()) == pytest.approx(1)
        assert all(share >= 0 for share in shares.values())
        assert shares["exposed communication"] == pytest.approx(one.result.exposed_share)


def test_without_tokens_the_answer_is_the_fastest_of_each_cluster() -> None:
    """With the most GPUs, of those that fit in memory."""
    study = study_of(["a100-tcp80", "a100-roce800"])
    *_, first, second = study.answer()
    for words, cluster in ((first, "a100-tcp80"), (second, "a100-roce800")):
        group = study.largest[cluster]
        best = max(group, key=lambda one: one.result.tokens_per_s)
        assert f"of {cluster}, {best.strategy} is the fastest at" in words
        assert f"{best.result.tokens_per_s:,.0f} tokens/s" in words


def test_of_two_clusters_the_answer_says_how_much_more_one_may_cost() -> None:
    """As much as it is faster, from its worst against the other's best to the contrary."""
    study = study_of(["a100-tcp80", "a100-roce800"])
    slow, fast = (
        max(study.largest[name], key=lambda one: one.result.tokens_per_s)
        for name in ("a100-tcp80", "a100-roce800")
    )
    ratio = fast.result.tokens_per_s / slow.result.tokens_per_s
    assert ratio > 2
    ends = [
        getattr(fast.result, f"tokens_per_s_{one}") / getattr(slow.result, f"tokens_per_s_{other}")
        for one, other in (("low", "high"), ("high", "low"))
    ]
    told = study.answer()
    assert told[0] == (
        f"a100-roce800 trains {ratio:.1f} times as fast as a100-tcp80 on 16 GPUs (90 %:"
        f" {ends[0]:.2g} to {ends[1]:.2g} times): it is worth up to {ratio:.1f} times the price an"
        " hour."
    )
    assert f"{fast.strategy} on a100-roce800, {slow.strategy} on a100-tcp80" in told[1]
    pairs = zip(study.largest["a100-roce800"], study.largest["a100-tcp80"], strict=True)
    gained = [(a.result.tokens_per_s / b.result.tokens_per_s, a.strategy) for a, b in pairs]
    most, strategy = max(gained)
    assert told[2].startswith(f"With {strategy}, a100-roce800 is {most:.1f} times as fast")
    assert ends[0] < 1
    assert "undecided" in told[3]
    assert f"a100-tcp80 is {slow.result.cluster}." in told[4]


def of_two(slow: str, fast: str, model: str = "gpt2-small") -> dict[str, list[Answered]]:
    """16 GPUs of two clusters, each with one strategy, or with several that "; " divides."""
    job = Case(cluster="", model=model, strategy="")
    found = {}
    for name, texts in (("a100-tcp80", slow), ("a100-roce800", fast)):
        cases = over_sizes(job, [name], texts.split("; "), "16")
        found[name] = [Answered(name, c.strategy, c, run(c), None) for c in cases]
    return found


def test_a_speed_is_no_price_where_steps_differ_in_worth() -> None:
    """A step of local updates on one cluster, of DDP on the other: only tokens/s are compared."""
    local, *others = "co2:tau=4,delay=1,worker=node", "ddp", "zero3"
    for slow, fast in [(local, other) for other in others] + [(other, local) for other in others]:
        told = list(comparison.clusters(of_two(slow, fast)))
        assert re.match(r"a100-roce800 is .* a100-tcp80 in tokens/s on 16 GPUs \(90 %: ", told[0])
        assert "worth" not in " ".join(told)
    for slow, fast in ((local, local), ("zero3", "ddp")):
        told = list(comparison.clusters(of_two(slow, fast)))
        assert re.match(r"a100-roce800 trains .*: it is worth up to [\d.]+ times", told[0])


def test_what_does_not_fit_gains_nothing() -> None:
    """DDP gains most from the faster network, and has no room for this model."""
    both = f"ddp; {STRATEGIES[2]}"
    assert "With ddp, a100-roce800" in " ".join(comparison.clusters(of_two(both, both)))
    groups = of_two(both, both, "transnormer-7b")
    assert [one.result.fits_in_memory for one in groups["a100-tcp80"]] == [False, True]
    assert "With ddp" not in " ".join(comparison.clusters(groups))


def test_without_prices_days_are_drawn_over_gpus() -> None:
    """Those of the totals, with their intervals; with prices money is drawn over days instead."""
    study = study_of(tokens=1e9)
    figure, *others = sections.money(study.all, STRATEGIES).figures
    assert others == []
    assert figure.chart
    points = drawn_points(dict(figure.chart))
    expected = {(o.strategy, o.result.gpus, o.totals.days) for o in study.all if o.totals}
    assert {(row["strategy"], row["gpus"], row["value"]) for row in points} == expected


def test_with_tokens_clusters_are_compared_by_days() -> None:
    """What a step is worth counts, so that the fastest strategy may be another one."""
    study = study_of(["a100-tcp80", "a100-roce800"], tokens=1e9)
    least = {}
    for name, group in study.largest.items():
        least[name] = min(one.totals.days for one in group if one.totals)
    ratio = least["a100-tcp80"] / least["a100-roce800"]
    assert f"a100-roce800 trains {ratio:.1f} times as fast as a100-tcp80" in study.answer()[0]
    worth = remark([one.result.strategy for one in study.all])
    assert "co2" in worth
    assert f"Counted in days and money: {worth}." in study.doubts()
    assert any(f"Speed is not progress: {worth}" in text for text in study_of().doubts())


def test_what_is_undecided_is_judged_by_progress_and_of_what_fits() -> None:
    """Pairs of neighbours in days, whose intervals of days overlap."""
    study = study_of(tokens=1e9)
    (group,) = study.largest.values()
    ranked = sorted((one for one in group if one.totals), key=lambda one: one.totals.days)  # type: ignore[union-attr]
    pairs = [
        f"{one.strategy} and {other.strategy}"
        for one, other in pairwise(ranked)
        if one.totals.days_high >= other.totals.days_low  # type: ignore[operator, union-attr]
    ]
    assert pairs
    assert any("; ".join(pairs) in text for text in study.doubts())


def test_equal_clusters_are_called_equal() -> None:
    """A number that does nothing here makes no difference worth a word."""
    study = study_of()
    twice = replace(
        study,
        cases=[*study.cases, *study.cases],
        results=[*study.results, *study.results],
        panels=[name for name in ("one", "other") for _ in study.cases],
    )
    told = twice.answer()
    assert told[0].startswith("one and other are equally fast on 16 GPUs (90 %: ")


@pytest.fixture
def co2sim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line."""
    return in_process("co2sim", main, monkeypatch, capsys)


def test_what_varies_has_panels_of_its_own(co2sim: Command, tmp_path: Path) -> None:
    """Two networks are two panels, each with the simulator's answer; strategies cannot vary so."""
    out = tmp_path / "r.html"
    given = ["report", "-c", "a100-tcp80", "-m", "gpt2-small", "-s", "ddp", "-g", "16"]
    speeds = ["25 Gbit/s", "400 Gbit/s"]
    done = co2sim(*given, "--vary", f"inter.bandwidth={', '.join(speeds)}", "-o", str(out))
    assert done.code == 0
    text = out.read_text("utf-8")
    for place, speed in enumerate(speeds):
        found = simulate(
            "a100-tcp80", "gpt2-small", "ddp", gpus=16, overrides={"inter.bandwidth": speed}
        )
        words = f"On 16 GPUs of a100-tcp80, inter.bandwidth={speed}, ddp runs at"
        assert f"{words} {found.tokens_per_s:,.0f} tokens/s" in html.unescape(text)
        points = drawn_points(held(text, "specs")[f"speed-{place}"])
        assert {point["value"] for point in points} == {found.tokens_per_s}
    wrong = co2sim(*given, "--vary", "strategy.tau=1,2", "-o", str(out))
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "--vary strategy.tau: here give --strategy" in wrong.err


def test_the_command_writes_a_page_or_says_why_not(co2sim: Command, tmp_path: Path) -> None:
    """The answer is printed, too; another suffix is refused in one line."""
    out = tmp_path / "r.html"
    given = ["report", "-c", "a100-tcp80", "-m", "gpt2-small", "-s", "ddp", "-g", "8", "-o"]
    done = co2sim(*given, str(out))
    assert done.code == 0
    assert "On 8 GPUs of a100-tcp80, ddp runs at" in done.out
    page = out.read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert f"co2sim {' '.join(given)} {out}" in page
    wrong = co2sim(*given, str(tmp_path / "r.pdf"))
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "must end in .html" in wrong.err


def test_a_missing_extra_is_named(
    co2sim: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The base install has no Vega: said before anything is simulated."""
    monkeypatch.setattr(bundle, "find_spec", lambda name: None if name == "vl_convert" else name)
    given = ["-c", "a100-tcp80", "-m", "gpt2-small", "-s", "ddp"]
    given += ["--report", str(tmp_path / "r.html")]
    for name in ("run", "scale"):
        done = co2sim(name, *given)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert "pip install 'co2sim[report]'" in done.err


@pytest.mark.parametrize("name", ["run", "scale"])
def test_other_commands_write_the_page_too(co2sim: Command, tmp_path: Path, name: str) -> None:
    """Beside what they print, which stays the same."""
    given = [name, "-c", "a100-tcp80", "-m", "gpt2-small", "-s", "ddp", "-s", "zero3", "-g", "8"]
    given += ["--out", str(tmp_path)] if name == "scale" else []
    out = tmp_path / "r.html"
    plain, done = co2sim(*given), co2sim(*given, "--report", str(out))
    assert (plain.code, done.code) == (0, 0)
    assert done.out.split() == [*plain.out.split(), "report", str(out)]
    assert "On 8 GPUs of a100-tcp80, " in out.read_text("utf-8")


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
