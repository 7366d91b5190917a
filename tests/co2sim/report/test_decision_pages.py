"""The pages of `co2sim plan`, `solve` and `sweep` say what --json says, and no more than fits."""

import html
import io
import json
import re
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("altair", reason="the extra `report` is not installed")
pytest.importorskip("vl_convert", reason="the extra `report` is not installed")

from commands import OFFER, Command, written
from html_pages import drawn_points, files, first_screen, heading, held

from co2sim.prediction.driver import run
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.report import bundle
from co2sim.studies import run_all

pytestmark = pytest.mark.slow  # each writes a page

HERE = ("-c", "a100-tcp80", "-m", "gpt2-small", "-g", "16")
SOLVE = ("solve", "inter.bandwidth", "--for", "efficiency=50%,90%", *HERE, "-s", "zero2")
SOLVE = (*SOLVE, "-s", "co2.published:tau=4,worker=node", "--from", "1 Gbit/s", "--to", "10 Tbit/s")
SWEEP = ("sweep", *HERE, "-s", "zero2", "--jobs", "1")
SWEEP = (*SWEEP, "--vary", "inter.bandwidth=10 Gbit/s, 100 Gbit/s", "--vary", "micro_batch=1,2")
EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Between a dear fast network, and a cheap slow one with a name that is no name."""
    folder, given = tmp_path_factory.getbasetemp() / "offers", ["plan", "-m", "gpt2-small"]
    folder.mkdir(exist_ok=True)  # this module is imported by another: the same page for both
    for key, name, price, rate in (("fast", EVIL, 3.0, 1600), ("slow", "ü" * 200, 2.0, 25)):
        path = folder / f"{key}.toml"
        path.write_text(OFFER.format(name=name, price=price, rate=rate, nodes=2), "utf-8")
        given += ["-c", str(path)]
    given += ["-s", "zero2", "-s", "co2:tau=12,delay=1", "--tokens", "1e10"]
    return (*given, "--global-batch", "256", "--deadline", "300 days", "--json")


def test_the_page_of_a_plan_says_what_json_says(
    tmp_path_factory: pytest.TempPathFactory, plan: tuple[str, ...]
) -> None:
    """The sentences, every option, and the data inside; what the answer names is marked."""
    done = written(tmp_path_factory, *plan)
    found, text = json.loads(done.out), done.text
    choice = found["choice"]
    offer = Path(choice["cluster"]).stem
    named = (choice["result"]["model"], "10B tokens", f"{choice['gpus']} GPUs of {offer}")
    assert all(words in heading(text) for words in named)
    assert f"{choice['totals']['cost']:,.0f} USD" in heading(text)
    assert all(name in first_screen(text) for name in (EVIL, "ü" * 200))
    inside = files(text)
    assert json.loads(inside["plan.json"]) == found
    points = [point for point in drawn_points(held(text, "specs")["options-0"]) if "days" in point]
    drawn = {(point["days"], point["cost"]) for point in points if "cost" in point}
    every = [*found["best"], *found["front"], *filter(None, [found["gamble"]])]
    options = [one["totals"] for one in every]
    assert drawn == {(one["days"], one["cost"]) for one in options}
    marks = {
        point["mark"].partition("\n")[0]: point["days"] for point in points if point.get("mark")
    }
    wanted = {"choice": "choice", "runner-up": "runner_up", "best trade": "best_trade"}
    wanted["gamble"] = "gamble"
    named = {words: found[key] for words, key in wanted.items() if found[key]}
    if found["best_trade"] == found["runner_up"]:
        del named["best trade"]
    assert marks == {words: one["totals"]["days"] for words, one in named.items()}
    assert {point["cluster"] for point in points if "cluster" in point} == {"fast", "slow"}
    sizes = {(point["days"], point["gpus"]) for point in points if "gpus" in point}
    assert sizes == {(one["totals"]["days"], one["gpus"]) for one in every}
    frame = pd.read_csv(io.BytesIO(inside["plan.csv"]))
    assert set(zip(frame["days"], frame["cost"], strict=True)) == drawn
    assert 300.0 in {point["days"] for point in points}


def test_the_chart_of_a_plan_has_the_gamble_with_its_odds(
    cli: Command, plan: tuple[str, ...]
) -> None:
    """Where a cheaper option may miss the deadline; the choice is marked beside it."""
    cheapest = json.loads(cli(*plan).out)["choice"]["totals"]
    deadline = f"{(cheapest['days'] + cheapest['days_high']) / 2} days"
    words = [deadline if word == "300 days" else word for word in plan]
    answer = json.loads(cli(*words, "--report", "r.html").out)
    text = Path("r.html").read_text("utf-8")
    points = drawn_points(held(text, "specs")["options-0"])
    marks = {point["mark"]: point["days"] for point in points if point.get("mark")}
    (gamble,) = (mark for mark in marks if mark.startswith("gamble"))
    assert marks[gamble] == answer["gamble"]["totals"]["days"]
    assert marks["choice"] == answer["choice"]["totals"]["days"]
    (odds,) = re.findall(r"(\d+)%", gamble)
    assert 0 < int(odds) < 100
    assert f"{odds}%" in first_screen(text)


def test_a_plan_without_prices_or_choice_has_a_page(cli: Command) -> None:
    """Days against GPU-hours; and where nothing is within the limits, what there is without."""
    out = Path("r.html")
    given = ["plan", "-m", "gpt2-small", "--tokens", "1e10", "-s", "zero2", "-c", "a800-1600g"]
    given += ["-g", "8,16", "--global-batch", "256", "--json", "--report", str(out)]
    found = json.loads(cli(*given).out)
    points = drawn_points(held(out.read_text("utf-8"), "specs")["options-0"])
    hours = {one["totals"]["gpu_hours"] for one in (*found["best"], *found["front"])}
    assert {point["cost"] for point in points} == hours
    assert cli(*given, "--deadline", "1 min").code == 1
    assert "0.000694444" in first_screen(out.read_text("utf-8"))


def test_the_page_of_solve_says_what_json_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every value that was looked at, with its interval, and where the targets are reached."""
    done = written(tmp_path_factory, *SOLVE, "--json")
    found, text = json.loads(done.out), done.text
    assert any(f"{one['answer']}." == heading(text) for one in found)
    asked = "GPT-2 small on 16 GPUs of 2 nodes of 8 A100-80GB"
    assert all(words in first_screen(text) for words in (asked, "efficiency 50 %", "zero2", "co2"))
    inside = files(text)
    assert json.loads(inside["solve.json"]) == found
    points = drawn_points(held(text, "specs")["target-0-0"])
    curve = {(p["strategy"], round(p["x"] / 8), p["value"]) for p in points if "at" in p}
    for one in found:
        for point in one["points"]:
            low, high = point["interval"]
            assert low < point["figure"] < high
        drawn = [x for name, x, _ in curve if name == one["strategy"]]
        for point in one["points"]:
            if min(drawn) <= round(point["value"]) <= max(drawn):
                assert (one["strategy"], round(point["value"]), point["figure"]) in curve
        for answer in one["answers"]:
            (met,) = answer["met"]
            assert (one["strategy"], round(met["low"]), answer["value"]) in curve
    assert {"90 %", "50 %"} <= {point.get("words") for point in points}
    assert len(pd.read_csv(io.BytesIO(inside["solve.csv"]))) == sum(len(o["points"]) for o in found)


def test_an_answer_needs_no_case_that_works(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where the case as it is cannot be simulated, the page has the answer without its levers."""
    given = ["solve", "gpus", "--for", "step=10 s", "-c", "a100-tcp80", "-m", "gpt2-small"]
    given += ["-s", "ddp", "--global-batch", "48", "--json"]
    done = written(tmp_path_factory, *given)
    assert json.loads(done.out)[0]["answer"] in html.unescape(done.text)


def test_the_page_of_a_sweep_says_what_json_says(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lines over the first number in its unit, one for each combination of the others."""
    done = written(tmp_path_factory, *SWEEP, "--json")
    rows, text = json.loads(done.out), done.text
    inside = files(text)
    assert json.loads(inside["sweep.json"]) == rows
    points = drawn_points(held(text, "specs")["speed-0"])
    found = {(point["at"], point["strategy"], point["value"]) for point in points}
    assert found == {
        (
            row["setting"]["inter.bandwidth"],
            f"micro_batch={row['setting']['micro_batch']}",
            row["tokens_per_s"],
        )
        for row in rows
    }
    assert {point["x"] for point in points} == {1e10, 1e11}
    best = max((row for row in rows if row["fits_in_memory"]), key=lambda row: row["tokens_per_s"])
    assert f"inter.bandwidth {best['setting']['inter.bandwidth']}" in heading(text)
    assert f"{best['tokens_per_s']:,.0f} tokens/s" in first_screen(text)
    inputs = html.unescape(text.partition('id="inputs"')[2])
    assert "<td>10 Gbit/s, 100 Gbit/s</td><td>varied</td>" in inputs


def test_what_is_no_number_has_bars_and_what_fails_is_named(cli: Command) -> None:
    """Strategies are bars; with --tokens there are days and money, too."""
    given = ["sweep", "-c", "a100-tcp80", "-m", "gpt2-small", "--jobs", "1", "--tokens", "1e9"]
    given += ["--vary", "strategy=zero2, fsdp", "--vary", "gpus=16,12", "--json"]
    done = cli(*given, "--set", "price_per_gpu=2 USD/h", "--report", "r.html")
    assert done.code == 1
    rows, text = json.loads(done.out), Path("r.html").read_text("utf-8")
    said = html.unescape(text)
    assert "2 of 4 cases" in said
    assert f"strategy=zero2, gpus=12: {rows[1]['error']}" in said
    specs, known = held(text, "specs"), [row for row in rows if "error" not in row]
    for key, figure in (
        ("speed-0", lambda row: row["tokens_per_s"]),
        ("money-0", lambda row: row["totals"]["days"]),
        ("money-1", lambda row: row["totals"]["cost"]),
    ):
        points = drawn_points(specs[key])
        assert {point["value"] for point in points} == {figure(row) for row in known}


def test_an_interrupted_sweep_says_so_on_its_page(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cases that were done; where none gave a result there is no page."""
    calls: list[Question] = []

    def stopping(case: Question, *, beside: bool) -> Result:
        calls.append(case)
        if len(calls) % 4 == 0:
            raise KeyboardInterrupt
        return run(case, beside=beside)

    monkeypatch.setattr(run_all, "run", stopping)
    assert cli(*SWEEP, "--report", "r.html").code == 130
    text = Path("r.html").read_text("utf-8")
    assert "3 of 4 cases" in text
    assert len(json.loads(files(text)["sweep.json"])) == 3
    assert cli(*SWEEP[:-2], "--vary", "micro_batch=0", "--report", "none.html").code == 2
    assert not Path("none.html").exists()


def test_a_missing_extra_is_named_before_anything_is_simulated(
    cli: Command, plan: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base install has no Vega: one line, code 2."""
    monkeypatch.setattr(bundle, "find_spec", lambda name: None if name == "vl_convert" else name)
    for words in (plan, SOLVE, SWEEP, ("run", *HERE, "-s", "ddp"), ("scale", *HERE, "-s", "ddp")):
        done = cli(*words, "--report", "r.html")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert ".[report]" in done.err
