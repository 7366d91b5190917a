"""`co2analysis bound`, `tau` and `trends`: their answers, and what they say to bad input."""

import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import Command
from rich.console import Console

from analysis.convergence import bound, tau
from analysis.convergence.objectives.mlp import Batches, digits
from analysis.convergence.setting import Setting
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
BOUND = [
    *("--smoothness", "2", "--noise", "1", "--gap", "3"),
    *("--workers", "8", "--rounds", "10000", "--local-steps", "8"),
]
TAU = ["--smoothness", "1", "--noise", "1", "--gap", "1"]


def without(usual: Sequence[str], given: Sequence[str]) -> list[str]:
    """The usual options but for those that are given: an option takes one value."""
    pairs = zip(usual[::2], usual[1::2], strict=True)
    return [word for name, value in pairs if name not in given for word in (name, value)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("verify --jobs -1", "--jobs is -1; it must be at least 0"),
        ("verify --out=", "--out is ''; it must be a folder"),
        *(
            (f"tau --cluster a100-tcp80 --target {t}", "--target is")
            for t in ("nan", "inf", "0", "-1")
        ),
        (
            "tau",
            "the times of rounds are missing: give folders of real runs, or simulate a cluster",
        ),
        ("tau --cluster a100-tcp80 runs/a", "--cluster does not apply to runs/a"),
        ("tau --taus 4 --gpus 8 runs/a", "--gpus, --taus does not apply to runs/a"),
        *(
            (f"tau -c a100-tcp80 -s {given}", f"--strategy is '{given}', but tau is what this")
            for given in ("co2:tau=8", "co2(tau=8)", "co2:worker=node,tau=8")
        ),
        ("tau -c a100-tcp80 -s ddp", "the strategy is ddp, which has no local steps; the bound is"),
        ("tau -c a100-tcp80 -s diloco", "the strategy is diloco; the bound is about co2, slowmo"),
        *((f"bound --penalty {p}", "penalty is") for p in ("inf", "0")),
        ("bound --most-penalty 0", "most_penalty is 0"),
        ("bound --gap 0 --noise 0", "gap is 0"),
        ("bound --momentum 1", "momentum is 1; it must be in [0, 1)"),
        (
            "bound --rounds 1" + "0" * 400,
            "rounds is a number of more than 20 digits; it must be 1 to 1e+60",
        ),
        ("trends --workers 0", "--workers is 0; it must be 1 to"),
        ("trends --workers 257", "--workers is 257; it must be 1 to 256"),
        ("trends --steps 4000 --seeds 3", "--steps times --seeds is 12,000; it must be at most"),
        ("trends --taus 1,600", "--taus is '1,600'; each must be from 1 to --steps, 512"),
    ],
)
def test_bad_input_is_one_line(co2analysis: Command, line: str, words: str) -> None:
    """What cannot be meant ends with exit code 2 and one line that says what and why."""
    command, *arguments = line.split(" ")
    usual = {"bound": BOUND, "tau": TAU}.get(command, [])
    done = co2analysis(command, *without(usual, arguments), *arguments)
    assert done.code == 2
    assert done.out == ""
    assert len(done.err.splitlines()) == 1
    assert words in done.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "the times of rounds are missing: give folders of real runs, or simulate a cluster"),
        ("-s ddp", "the strategy is ddp, which has no local steps; the bound is about co2"),
        ("-c a100-tcp80", "--smoothness, --noise, --gap are missing"),
        ("-c a100-tcp80 --noise 1 --gap 1", "--smoothness is missing"),
        ("runs/a --noise 1", "--smoothness, --gap are missing"),
    ],
)
def test_tau_asks_first_for_what_matters_most(co2analysis: Command, line: str, words: str) -> None:
    """First the strategy and where rounds come from, then all constants that are missing."""
    done = co2analysis("tau", *line.split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {words}")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("", "--smoothness, --noise, --gap, --workers, --rounds, --local-steps are"),
        ("--gap 3 --noise 1 --rounds 9 --workers 2", "--smoothness, --local-steps are"),
        ("--smoothness 2 --gap 3 --noise 1 --rounds 9 --workers 2", "--local-steps is"),
    ],
)
def test_bound_names_all_that_is_missing(co2analysis: Command, line: str, missing: str) -> None:
    """Of the numbers that it requires, one line names all that are missing, in their order."""
    done = co2analysis("bound", *line.split())
    assert (done.code, done.out, done.err) == (2, "", f"error: {missing} missing\n")


@pytest.mark.parametrize("line", ["verify --quick --out made", "trends --taus 1"])
def test_missing_data_are_named(
    co2analysis: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    """Without scikit-learn: one line that says what to install, exit code 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    digits.cache_clear()
    done = co2analysis(*line.split())
    assert done.code == 2
    message = (
        "error: the data of `verify` and `trends` come with scikit-learn, which is not installed:"
        " pip install 'co2sim[analysis]'"
    )
    assert done.err.splitlines() == [message]
    assert not list(tmp_path.iterdir())


def test_theory_needs_no_data(co2analysis: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bound` and `tau` work without scikit-learn."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert co2analysis("bound", *BOUND).code == 0
    case = ("-c", "a100-tcp80", "-g", "16", "-m", "gpt2-small", "--taus", "4")
    assert co2analysis("tau", *TAU, *case).code == 0


@pytest.mark.slow
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


def test_bound_command(co2analysis: Command) -> None:
    """Numbers inside the condition, the word outside."""
    tuned = json.loads(co2analysis("bound", *BOUND, "--json").out)
    assert tuned["feasible"]
    assert tuned["tuned"]
    assert tuned["largest_inner_step"] == pytest.approx(1 / (2 * 17))
    terms = [tuned["bound"][name] for name in bound.TERMS]
    assert tuned["bound"]["total"] == pytest.approx(sum(terms))
    beyond = co2analysis("bound", *BOUND, "--inner-step", "0.03")
    assert beyond.code == 0
    assert "infeasible: no bound holds here" in beyond.out


def test_overflow_is_null_in_json(co2analysis: Command) -> None:
    """JSON has no infinity: a drift too large for a number is null, and so is the bound."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    options = ("--local-steps", "2000", "--inner-step", "0.45", "--delay", "0", "--json")
    done = co2analysis("bound", *without(BOUND, options), *options)
    terms = json.loads(done.out, parse_constant=refuse)["bound"]
    assert terms["drift"] is None
    assert terms["total"] is None
    assert terms["noise"] == pytest.approx(2 * 0.45 * 1 / 8)


def test_tau_depends_on_the_network(co2analysis: Command) -> None:
    """Between sites at 1 Gbit/s the best tau is larger than on 80 Gbit/s, and it is said why."""
    answers = {}
    for cluster in ("a100-tcp80", "two-sites-wan"):
        done = co2analysis(
            *("tau", "--smoothness", "10", "--noise", "1", "--gap", "5", "--cluster", cluster),
            *("--model", "gpt2-medium", "--strategy", "co2:worker=node", "--gpus", "64"),
            *("--taus", "2,8,32", "--times", "10 h", "--target", "0.1", "--json"),
        )
        assert done.code == 0, done.err
        answers[cluster] = json.loads(done.out)
    best = {cluster: answer["after"][0]["best_tau"] for cluster, answer in answers.items()}
    assert best["a100-tcp80"] < best["two-sites-wan"]
    for answer in answers.values():
        assert len(answer["after"][0]["why"]) >= 3
        assert answer["assumptions"]
        assert all(seconds > 0 for seconds in answer["seconds_to_target"])


@pytest.mark.parametrize(("cluster", "fits"), [("cloud-25g", False), ("a100-tcp80", True)])
def test_tau_says_where_the_case_does_not_fit(
    co2analysis: Command,
    cluster: str,
    fits: bool,  # noqa: FBT001 - pytest's
) -> None:
    """GPT-2 XL has 25 GB of states in mixed precision: too much for 16 GB, not for 80 GB."""
    asked = ["tau", *TAU, "--cluster", cluster, "--gpus", "16", "--taus", "2,4"]
    done = co2analysis(*asked)
    assert done.code == 0, done.err
    note = "\ndoes not fit in the memory of a GPU: shown as if it did\n"
    assert (note in done.out) is not fits
    answer = json.loads(co2analysis(*asked, "--json").out)
    assert [timing["fits_in_memory"] for timing in answer["timings"]] == [fits, fits]


def test_taus_that_do_not_fit_are_named() -> None:
    """Where only some do not fit, the note says which; of measured rounds it says nothing."""
    timings = [replace(timing(n, 2.0 * n), fits_in_memory=n < 4) for n in (2, 4, 8)]
    for given, there in ((timings, True), ([timing(2, 4.0), timing(4, 8.0)], False)):
        shown = Console(width=250, record=True, file=io.StringIO())
        print_tau(shown, given, [(1e5, tau.after(PROBLEM, given, 1e5))], None, [], [])
        assert ("tau 4, 8: does not fit" in (text := shown.export_text())) is there
        assert ("does not fit" in text) is there


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


@pytest.mark.parametrize(
    ("strategy", "tau_", "workers", "delay"),
    [
        ("co2:tau=6", 6, 16, 1),
        ("co2:staleness=2,worker=node", 12, 2, 2),
        ("slowmo:tau=4", 4, 16, 0),
        ("local_sgd:worker=node", 12, 2, 0),
    ],
)
def test_rounds_say_who_averages_when(strategy: str, tau_: int, workers: int, delay: int) -> None:
    """Workers are GPUs or nodes; an average is used after CO2's staleness, or at once."""
    case = Case(cluster="a100-tcp80", model="gpt2-small", strategy=strategy, gpus=16)
    (round_,) = tau.simulated(case, [tau_])
    assert (round_.tau, round_.workers, round_.delay) == (tau_, workers, delay)
    assert round_.round_time > 0


@pytest.mark.parametrize("strategy", ["zero3", "ddp", "overlap_local_sgd"])
def test_tau_refuses_what_the_bound_is_not_about(strategy: str) -> None:
    """Only the local-update strategies of the theorem have an answer."""
    case = Case(cluster="a100-tcp80", model="gpt2-small", strategy=strategy)
    with pytest.raises(OptionError, match=f"the strategy is {strategy}"):
        tau.simulated(case, [2])


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
    slopes, _ = sampler.gradients(points, drawn, np.zeros(1))
    length = np.linalg.norm(slopes.mean(axis=(0, 1)) - network.gradient(point))
    assert length < 1.5 * math.sqrt(sampler.variance(point, rng) / 4000)


@pytest.mark.slow
def test_trends_are_labelled(co2analysis: Command) -> None:
    """Every method trains the network, and the output says what it is not."""
    done = co2analysis("trends", "--steps", "32", "--taus", "4", "--seeds", "1", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert answer["label"].startswith("A trend, not a check")
    assert [line["method"] for line in answer["trends"]] == ["local SGD", "SlowMo", "CO2"]
    assert all(line["loss"] < 1.0 for line in answer["trends"])
    assert all(line["largest_step"] > 0 for line in answer["trends"])
