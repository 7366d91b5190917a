"""`co2analysis verify`, `bound` and `tau`: they hold, they can fail, they go on where they were."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.console import Console

from analysis.cli import convergence
from analysis.convergence import bound, tau
from analysis.convergence.bound import Bound, Infeasible, Setting
from analysis.convergence.objectives.families import FAMILIES
from analysis.convergence.objectives.mlp import Batches, digits
from analysis.convergence.pages import Heading, Table, Text, markdown, to_html
from analysis.convergence.protocol import rates, tightness, verify
from analysis.convergence.simulate import run, variants
from analysis.convergence.tau_report import print_tau
from co2sim.case import Case
from co2sim.errors import OptionError

PROBLEM = Setting(
    smoothness=10.0,
    noise=1.0,
    gap=5.0,
    workers=1,
    rounds=1,
    local_steps=1,
    inner_step=1.0,
)


def co2analysis(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    command = [sys.executable, "-m", "analysis", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def protocol(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a quick protocol that was run as a user runs it."""
    folder = tmp_path_factory.mktemp("verify")
    done = co2analysis("verify", "--quick", "--out", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILS" not in done.stdout
    return folder


def test_quick_protocol_holds(protocol: Path) -> None:
    """No violation on thousands of configurations, a tight family, and every other check."""
    found = json.loads((protocol / "results.json").read_bytes())
    assert found["passed"]
    assert found["quick"]
    assert found["grid"]["violations"] == 0
    assert found["grid"]["configurations"] >= verify.LEAST_CONFIGURATIONS
    assert found["grid"]["configurations"] < found["grid"]["settings"]
    assert all(found["grid"]["noticed"][name]["begins"] > 0.5 for name in bound.TERMS)
    assert max(line["largest"] for line in found["grid"]["by_family"].values()) > verify.TIGHT
    assert all(check["passed"] for check in found["checks"])
    assert {line["family"] for line in found["rates"]["fits"] if line["found"]} == {"two kinds"}
    lost = {
        (part["delay"], line["rule"])
        for part in found["isolation"]["rescue"]
        for line in part["lines"]
        if line["lost"] and line["load"] > 1
    }
    assert (1, "neither") in lost
    assert (1, "penalty 4") not in lost
    assert (0, "neither") not in lost


def test_report_has_its_figures(protocol: Path) -> None:
    """Markdown refers to pictures that are there; HTML holds them."""
    page = (protocol / "report.md").read_text()
    for name in ("bound.png", "rates.png", "rescue.png", "oracle.png"):
        assert f"]({name})" in page
        assert (protocol / name).read_bytes().startswith(b"\x89PNG")
    whole = (protocol / "report.html").read_text()
    assert whole.count("data:image/png;base64,") == 4
    assert "Everything holds." in whole


@pytest.mark.parametrize("factor", [0.0, 0.5])
@pytest.mark.parametrize("name", bound.TERMS)
def test_wrong_constants_are_noticed(
    protocol: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    factor: float,
) -> None:
    """With any one term missing or halved violations are reported, with exit code 1."""
    right = bound.evaluate

    def wrong(setting: Setting) -> Bound | Infeasible:
        found = right(setting)
        if isinstance(found, Infeasible):
            return found
        return replace(found, **{name: factor * getattr(found, name)})

    monkeypatch.setattr(bound, "evaluate", wrong)
    with pytest.raises(typer.Exit) as ended:
        convergence.verify(out=protocol, quick=True, jobs=1, json_=True)
    assert ended.value.exit_code == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"]
    assert found["grid"]["violations"] > 0
    assert "Violations" in (protocol / "report.md").read_text()


def test_interrupted_protocol_goes_on(protocol: Path) -> None:
    """Only cells that are missing are measured, and they come out the same."""
    cells = protocol / "cells"
    lost = min(cells.glob("oracle-*.json"), key=lambda path: path.stat().st_size)
    before = lost.read_bytes()
    lost.unlink()
    seen: list[tuple[int, int]] = []
    verify.measure(
        cells, quick=True, jobs=1, progress=lambda done, whole: seen.append((done, whole))
    )
    whole = seen[0][1]
    assert seen == [(whole - 1, whole), (whole, whole)]
    assert lost.read_bytes() == before


def test_infeasible_is_never_a_violation() -> None:
    """Outside the condition a row has neither a ratio nor a verdict."""
    beyond = replace(PROBLEM, inner_step=1.0)
    row = tightness.Row("any", 1, "1", beyond, 1e9, 0.0, bound.evaluate(beyond))
    assert not row.violated
    assert math.isnan(row.ratio)
    assert tightness.summary([row, row])["infeasible"] == 2


def test_the_same_run_counts_once() -> None:
    """Rows of equal family, measurement and bound are one configuration; others are not."""
    inside = replace(PROBLEM, inner_step=1e-3)
    row = tightness.Row("any", 1, "1", inside, 0.5, 0.0, bound.evaluate(inside))
    again = row._replace(setting=replace(inside, workers=7), family="any, exact")
    other = row._replace(measured=0.6)
    assert tightness.distinct([row, again, other]) == [row, other]


def test_few_seeds_widen_the_margin() -> None:
    """The margin has the coverage of 3 normal standard errors: Student's t, from tables."""
    assert tightness.margin(10_000) == pytest.approx(3, abs=2e-3)
    assert tightness.margin(4) == pytest.approx(9.22, abs=0.02)


def test_variants_apart_do_not_share_noise() -> None:
    """Two equal variants see the same noise, or, apart, noise of their own."""
    which = variants(np.full(2, 0.1), noise=1.0)
    sizes = {"workers": 2, "rounds": 4, "local_steps": 3, "seeds": 5}
    problem = FAMILIES["isotropic"](2)
    one, two = run(problem, which, **sizes).gradient
    np.testing.assert_array_equal(one, two)
    one, two = run(problem, which, **sizes, apart=True).gradient
    assert (one != two).all()


def test_broken_cells_are_measured_again(tmp_path: Path) -> None:
    """An empty file, a cut one and one of another kind are as good as none."""
    for text in ("", '{"scores": [[1.', "[]", "{}"):
        place = tmp_path / "cell.json"
        place.write_text(text)
        assert verify._kept(place) is None
    place.write_text('{"scores": []}')
    assert verify._kept(place) == {"scores": []}
    assert verify._kept(tmp_path / "none.json") is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("verify", "--jobs", "-1"), "--jobs is -1; it must be 0 (all cores) or more"),
        (("verify", "--out", ""), "--out is ''; it must be a folder"),
        *((("tau", "--target", t), "--target is") for t in ("nan", "inf", "0", "-1")),
        *((("bound", "--penalty", p), "penalty is") for p in ("inf", "0")),
        (("bound", "--most-penalty", "0"), "most_penalty is 0"),
        (("bound", "--gap", "0", "--noise", "0"), "gap is 0"),
        (("bound", "--rounds", "1" + "0" * 400), "rounds is above 1e300"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    """What cannot be meant ends with exit code 2 and one line that says what and why."""
    usual = {"--smoothness": "1", "--noise": "1", "--gap": "1"}
    if arguments[0] == "bound":
        usual |= {"--workers": "4", "--rounds": "100", "--local-steps": "8"}
    if arguments[0] == "tau":
        usual |= {"--cluster": "a100-tcp80"}
    if arguments[0] == "verify":
        usual = {}
    usual |= dict(zip(arguments[1::2], arguments[2::2], strict=True))
    done = co2analysis(arguments[0], *(part for pair in usual.items() for part in pair))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_search_for_tau_goes_on_while_longer_is_better() -> None:
    """Over a slow network the search goes beyond the usual taus, until longer is worse."""
    case = Case(cluster="two-sites-wan", model="gpt2-medium", strategy="co2:worker=node", gpus=64)
    timings = tau.searched(replace(PROBLEM, gap=1e-3, noise=1e-9), case, [1e6])
    assert timings[-1].tau > max(tau.USUAL)
    chosen = tau.best(tau.after(replace(PROBLEM, gap=1e-3, noise=1e-9), timings, 1e6))
    assert chosen.timing.tau < timings[-1].tau or timings[-1].tau == tau.LONGEST


def test_runs_of_the_same_tau_are_told_apart() -> None:
    """Two measured runs with one tau keep their own rows, titles and bounds; 0 is no gap."""
    slow = replace(timing(4, 8.0), source="measured in slow", exposed=None)
    timings = [timing(4, 2.0), slow]
    choices = tau.after(PROBLEM, timings, 1e5)
    shown = Console(width=250, record=True, file=io.StringIO())
    print_tau(shown, timings, [(1e5, choices)], None, [], tau.assumptions(PROBLEM))
    text = shown.export_text()
    assert "measured in slow" in text
    lines = [line for line in text.splitlines() if "workers, averages" in line]
    assert len(lines) == 2
    assert "0.0%" in lines[0]
    assert "unknown" in lines[1]
    assert f"{choices[0].bound.total:.4g}" in lines[0]
    assert f"{choices[1].bound.total:.4g}" in lines[1]
    assert "zeta^2 = 0" in text
    assert list(tau.explain(choices, 4))[-1] == "It is the largest asked for; try longer."


def test_diverged_measurement_is_a_violation() -> None:
    """NaN never passes."""
    inside = replace(PROBLEM, inner_step=1e-3)
    row = tightness.Row("any", 1, "1", inside, math.nan, math.nan, bound.evaluate(inside))
    assert row.violated


def test_fits_find_what_was_put_in() -> None:
    """Slopes of a power law, and the coefficients of a sum of features, come back."""
    sizes = np.array([[g, t, r] for g in (1, 4, 16) for t in (1, 8, 64) for r in (256.0, 4096.0)])
    workers, steps, rounds = sizes.T
    power = 3 * workers**-0.4 * steps**-0.3 * rounds**-0.6
    np.testing.assert_allclose(rates.slopes(sizes, power), [-0.4, -0.3, -0.6])
    whole = 1.5 / np.sqrt(workers * steps * rounds) + 2 / rounds + 0.1 * workers * steps / rounds
    coefficients, error = rates.fit(sizes, whole)
    np.testing.assert_allclose(coefficients, [1.5, 2, 0, 0.1], atol=1e-9)
    assert error < 1e-9
    assert rates.fit(sizes, whole, last=False)[1] > 0.1


def test_bound_command() -> None:
    """Numbers inside the condition, the word outside, one line for what is out of range."""
    asked = "--smoothness 2 --noise 1 --gap 3 --workers 8 --rounds 10000 --local-steps 8"
    tuned = json.loads(co2analysis("bound", *asked.split(), "--json").stdout)
    assert tuned["feasible"]
    assert tuned["tuned"]
    assert tuned["largest_inner_step"] == pytest.approx(1 / (2 * 17))
    terms = [tuned["bound"][name] for name in bound.TERMS]
    assert tuned["bound"]["total"] == pytest.approx(sum(terms))
    beyond = co2analysis("bound", *asked.split(), "--inner-step", "0.03")
    assert beyond.returncode == 0
    assert "infeasible: the theorem is silent" in beyond.stdout
    wrong = co2analysis("bound", *asked.split(), "--momentum", "1")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines() == ["error: momentum is 1; it must be in [0, 1)"]


def test_tau_depends_on_the_network() -> None:
    """Between sites at 1 Gbit/s the best tau is larger than on 80 Gbit/s, and it is said why."""
    found = {}
    for cluster in ("a100-tcp80", "two-sites-wan"):
        done = co2analysis(
            *("tau", "--smoothness", "10", "--noise", "1", "--gap", "5", "--cluster", cluster),
            *("--model", "gpt2-medium", "--strategy", "co2:worker=node", "--gpus", "64"),
            *("--taus", "2,8,32", "--times", "10 h", "--target", "0.1", "--json"),
        )
        assert done.returncode == 0, done.stderr
        found[cluster] = json.loads(done.stdout)
    best = {cluster: answer["after"][0]["best_tau"] for cluster, answer in found.items()}
    assert best["a100-tcp80"] < best["two-sites-wan"]
    for answer in found.values():
        assert len(answer["after"][0]["why"]) >= 3
        assert answer["assumptions"]
        assert all(seconds > 0 for seconds in answer["seconds_to_target"])


def timing(steps: int, seconds: float) -> tau.Timing:
    """A measured round of 8 workers of CO2."""
    return tau.Timing(
        tau=steps, round_time=seconds, exposed=0.0, workers=8, delay=1, source="measured"
    )


def test_tau_is_as_short_as_the_network_hides() -> None:
    """With rounds as long as max(tau, 8) seconds, 8 steps are best: shorter ones wait."""
    timings = [timing(steps, max(steps, 8.0)) for steps in (1, 2, 4, 8, 16, 32)]
    choices = tau.after(PROBLEM, timings, 1e6)
    assert tau.best(choices).timing.tau == 8
    assert len(tau.after(PROBLEM, timings, 10.0)) == 4


def test_time_to_a_target_is_the_first() -> None:
    """The bound reaches the target then, and not one percent earlier."""
    mine = timing(4, 2.0)
    reached = tau.until(PROBLEM, mine, 0.05)
    assert reached is not None
    assert tau.after(PROBLEM, [mine], reached)[0].bound.total <= 0.05
    assert tau.after(PROBLEM, [mine], 0.99 * reached)[0].bound.total > 0.05


def test_tau_refuses_what_the_bound_is_not_about() -> None:
    """Only the local-update strategies of the theorem have an answer."""
    with pytest.raises(OptionError):
        tau.simulated(Case(cluster="a100-tcp80", model="gpt2-small", strategy="ddp"), [2])
    neither = co2analysis("tau", "--smoothness", "1", "--noise", "1", "--gap", "1")
    assert neither.returncode == 2
    assert "give runs or --cluster" in neither.stderr


def test_network_gradients() -> None:
    """They are those of the loss, and of workers with other images the mean is that of all."""
    rng = np.random.default_rng(0)
    network, parted = digits(), digits(4)
    point = network.start
    step = 1e-5 * rng.standard_normal(point.shape)
    slope = (network.value(point + step) - network.value(point - step)) / 2
    assert slope == pytest.approx(network.gradient(point) @ step, rel=1e-5)
    each = parted.gradients(np.repeat(point[None], 4, axis=0))
    np.testing.assert_allclose(each.mean(axis=0), parted.gradient(point), atol=1e-12)
    assert parted.spread(point) == pytest.approx(((each - each.mean(axis=0)) ** 2).sum(-1).mean())
    sampler = Batches(network, 16)
    drawn = sampler.draw(rng, (1, 4000, 1))[0]
    points = np.broadcast_to(point, (4000, 1, len(point)))
    found, _ = sampler.gradients(points, drawn, np.zeros(1))
    length = np.linalg.norm(found.mean(axis=(0, 1)) - network.gradient(point))
    assert length < 1.5 * math.sqrt(sampler.variance(point, rng) / 4000)


def test_trends_are_labelled() -> None:
    """Every method trains the network, and the output says what it is not."""
    done = co2analysis("trends", "--steps", "64", "--taus", "4", "--seeds", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["label"].startswith("A trend, not a check")
    assert [line["method"] for line in found["trends"]] == ["local SGD", "SlowMo", "CO2"]
    assert all(line["loss"] < 1.5 for line in found["trends"])
    assert all(line["largest_step"] > 0 for line in found["trends"])


def test_pages() -> None:
    """Cells cannot break a table, and nothing is markup in HTML."""
    blocks = [Heading("A & B", 1), Text("x < y"), Table(["|a|"], [["b|c"]])]
    assert markdown(blocks).decode() == "# A & B\n\nx < y\n\n| \\|a\\| |\n| --- |\n| b\\|c |\n"
    assert "<p>x &lt; y</p>" in to_html(blocks, {}).decode()
