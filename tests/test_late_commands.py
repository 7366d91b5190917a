"""`co2analysis bound --delay` in steps or rounds, `--allowed-delay`, and `tau` with lateness."""

import json
from dataclasses import dataclass, replace

import pytest
from commands import Command

from analysis.convergence import bound, tau
from analysis.convergence.bound import Bound
from analysis.convergence.lateness import Late
from analysis.convergence.setting import Setting
from analysis.convergence.tau_report import print_tau
from co2sim.console.tables import console
from co2sim.errors import OptionError
from co2sim.strategies import parse

BOUND = (
    *("bound", "--smoothness", "2", "--noise", "1", "--gap", "3"),
    *("--workers", "8", "--rounds", "10000", "--local-steps", "8"),
)
SETTING = Setting(
    smoothness=2.0, noise=1.0, gap=3.0, workers=8, rounds=10_000, local_steps=8, inner_step=0.01
)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ((), {}),
        (("--delay", "1 round"), {}),
        (("--delay", "2 rounds"), {"delay": 2}),
        (("--delay", "0"), {"delay": 0}),
        (("--delay", "3"), {"late": Late(steps=3)}),
        (("--delay", "8 steps"), {"late": Late(steps=8)}),
        (
            ("--delay", "3", "--keep", "0.5", "--predict", "0.25"),
            {"late": Late(steps=3, keep=0.5, predict=0.25)},
        ),
    ],
)
def test_delays_in_steps_and_rounds(
    co2analysis: Command, words: tuple[str, ...], change: dict[str, object]
) -> None:
    """The four terms are those of the setting that the words mean; CO2 is the default."""
    done = co2analysis(*BOUND, "--inner-step", "0.01", *words, "--json")
    found = json.loads(done.out)["bound"]
    expected = bound.evaluate(replace(SETTING, **change))  # type: ignore[arg-type]
    assert isinstance(expected, Bound)
    assert [found[name] for name in bound.TERMS] == [
        pytest.approx(getattr(expected, name), rel=1e-12) for name in bound.TERMS
    ]


def test_what_is_not_covered_is_said(co2analysis: Command) -> None:
    """Clipping and other local steps always; of late averages what they leave out; costs, too."""
    plain = co2analysis(*BOUND).out
    assert "not covered:" in plain
    assert "52 times the bound" in plain
    assert "keep 0" not in plain
    late = co2analysis(*BOUND, "--delay", "4", "--keep", "0.5").out
    assert "52 times the bound" in late
    assert "keep 0" in late
    assert "with steps before an arrival counted 1, not 0.5" in late
    assert "drift over that of waiting for the average" in late
    answer = json.loads(co2analysis(*BOUND, "--delay", "4", "--keep", "0.5", "--json").out)
    assert len(answer["not_covered"]) == 5
    assert answer["mean_over_all_steps"] == pytest.approx(answer["bound"]["total"] * 6 / (0.5 * 8))
    assert answer["drift_over_waiting"] > 1


def test_allowed_delay(co2analysis: Command) -> None:
    """The longest delay that raises the bound by at most that share, in words and as JSON."""
    words = ("--allowed-delay", "0.2")
    answer = json.loads(co2analysis(*BOUND, *words, "--json").out)["allowed_delay"]
    steps = answer["steps"]
    assert 0 < steps < 8
    prices = {line["delay"]: line["price"] for line in answer["delays"]}
    assert prices[f"{steps} steps"] <= 0.2
    totals = []
    for d in (steps, steps + 1):
        tuned = bound.evaluate(bound.tuned(replace(SETTING, late=Late(steps=d))))
        assert isinstance(tuned, Bound)
        totals.append(tuned.total)
    waiting = bound.evaluate(bound.tuned(replace(SETTING, delay=0)))
    assert isinstance(waiting, Bound)
    assert totals[0] <= 1.2 * waiting.total < totals[1]
    shown = " ".join(co2analysis(*BOUND, *words).out.split())
    assert f"An average may be used up to {steps} of 8 local steps late" in shown
    assert "1 round" in shown


def test_allowed_delay_where_the_condition_ends(co2analysis: Command) -> None:
    """With a given step the longest feasible delay is named; maybe waiting has no bound either."""
    steps = ("--inner-step", "0.04", "--outer-step", "1.5")
    shown = " ".join(co2analysis(*BOUND, *steps, "--allowed-delay", "9").out.split())
    assert "The condition of the theorem holds up to" in shown
    answer = json.loads(co2analysis(*BOUND, *steps, "--allowed-delay", "9", "--json").out)
    longest = answer["allowed_delay"]["feasible_steps"]
    unbounded = replace(SETTING, inner_step=0.04, outer_step=1.5, late=Late(steps=longest + 1))
    assert bound.load(unbounded) >= 1 > bound.load(replace(unbounded, late=Late(steps=longest)))
    lost = co2analysis(*BOUND, "--inner-step", "1", "--allowed-delay", "0.5")
    assert "There is no bound even for waiting" in lost.out
    assert lost.code == 0
    late = ("--delay", "1", "--keep", "0.5")
    dear = " ".join(co2analysis(*BOUND, *late, "--allowed-delay", "0").out.split())
    assert "With any lateness of an average the bound is above 1 times" in dear
    assert "Steps before an arrival count 0.5" in dear


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--delay", "9"), "delay is 9 steps; it must be at most local_steps, 8"),
        (("--delay", "x"), "--delay is 'x'; it must be a number of local steps"),
        (("--delay", "1 turn"), "--delay is '1 turn'; it must be a number of local steps"),
        (("--keep", "0.5"), "--keep and --predict are for a delay in local steps"),
        (("--delay", "2 rounds", "--predict", "0.5"), "--keep and --predict are for a delay in"),
        (("--delay", "2", "--keep", "0"), "keep is 0"),
        (("--delay", "2", "--predict", "1"), "predict is 1; it must be at least 0 and below 1"),
        (("--allowed-delay", "-1"), "--allowed-delay is -1"),
        (
            ("--delay", "2", "--predict", "0.5", "--most-penalty", "2"),
            "a varying penalty with predict above 0 is not covered",
        ),
    ],
)
def test_bad_input_is_one_line(co2analysis: Command, words: tuple[str, ...], message: str) -> None:
    """Exit code 2, and one line that says what and why."""
    done = co2analysis(*BOUND, *words)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1
    assert message in done.err


def test_tau_takes_penalties(co2analysis: Command) -> None:
    """A penalty lowers the step that an average makes: answers are those of the setting with it."""
    case: tuple[str, ...]
    case = ("tau", "--smoothness", "10", "--noise", "1", "--gap", "5", "--cluster", "a100-tcp80")
    case += ("--model", "gpt2-small", "--gpus", "16", "--taus", "4", "--times", "1 h", "--json")
    totals = {}
    for words in ((), ("--penalty", "2"), ("--most-penalty", "2")):
        choice = json.loads(co2analysis(*case, *words).out)["after"][0]["choices"][0]
        totals[words] = choice["bound"]["total"]
    assert totals["--most-penalty", "2"] > totals["--penalty", "2"] > totals[()]
    both = co2analysis(*case, "--penalty", "2", "--most-penalty", "2")
    assert (both.code, both.err) == (2, "error: give penalty or most_penalty, not both\n")


def test_tau_reckons_with_late_averages(capsys: pytest.CaptureFixture[str]) -> None:
    """A round whose average is 3 steps late has the bound of that, and says so."""
    late = tau.Timing(
        tau=8,
        round_time=1.0,
        exposed=0.0,
        workers=8,
        delay=0,
        source="measured",
        late=Late(steps=3, keep=0.5, predict=0.5),
    )
    (choice,) = tau.after(SETTING, [late], 10_000)
    expected = bound.evaluate(bound.tuned(replace(SETTING, late=late.late)))
    assert choice.bound == expected
    assumed = tau.assumptions(SETTING, [late])
    print_tau(console(), [late], [(10_000, [choice])], None, [], assumed)
    shown = capsys.readouterr().out
    assert "averages 3 steps late" in shown
    assert "Steps before a late average arrives count 0.5 in the error." in shown


def test_late_strategies() -> None:
    """A strategy's own delay counts, if it is a number; without one averages are rounds late."""
    assert tau.late_of(tau.averaging(parse("co2"))) is None
    assert tau.late_of(tau.averaging(parse("slowmo"))) is None
    assert tau.late_of(_Delayed(3, 0.5, 0.25)) == Late(steps=3, keep=0.5, predict=0.25)
    assert tau.late_of(_Delayed(2, 1.0, 0.0)) == Late(steps=2)
    with pytest.raises(OptionError, match="delay is auto; the bound needs a number"):
        tau.late_of(_Delayed("auto", 1.0, 0.0))


@dataclass(frozen=True)
class _Delayed:
    """What a strategy with a delay says of it."""

    delay: int | str
    keep: float
    predict: float
