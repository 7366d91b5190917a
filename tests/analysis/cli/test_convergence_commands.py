"""`co2analysis bound`, `tau`, `verify` and `trends`: what they say is that of functions."""

import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command
from rich.console import Console
from simulated_record import measured

from analysis.convergence import bound, clipping, tau, verify
from analysis.convergence.bound import Bound
from analysis.convergence.setting import Late, Setting
from analysis.convergence.simulate import disagreement
from analysis.convergence.tau import print_tau
from co2sim.common.errors import OptionError
from co2sim.prediction.question import Question
from co2sim.strategies import parse
from co2sim.strategies.co2 import CO2
from realrun.record import write
from realrun.train.folder import ESTIMATE, RECORD
from realrun.train.log import Log, LogRow
from realrun.train.settings import TrainSettings

BOUND = (
    *("bound", "--smoothness", "2", "--noise", "1", "--gap", "3"),
    *("--workers", "8", "--rounds", "10000", "--local-steps", "8"),
)
SETTING = Setting(
    smoothness=2.0, noise=1.0, gap=3.0, workers=8, rounds=10_000, local_steps=8, inner_step=0.01
)


def co2(steps: int, tau: int = 8) -> Late:
    """A late average as CO2 uses it when nothing but the delay is given."""
    strategy = CO2(tau=tau, delay=steps)
    keep, predict = strategy.kept()
    return Late(steps=steps, keep=keep, predict=predict)


TAU = ("tau", "--smoothness", "10", "--noise", "1", "--gap", "5")
PROBLEM = Setting(
    smoothness=10.0, noise=1.0, gap=5.0, workers=1, rounds=1, local_steps=1, inner_step=1.0
)


def refuse(name: str) -> None:
    """NaN and Infinity are no JSON."""
    raise AssertionError(name)


def answer(command: Command, *arguments: str) -> dict[str, Any]:
    """What a command prints as JSON."""
    done = command(*arguments, "--json")
    assert (done.code, done.err) == (0, "")
    found: dict[str, Any] = json.loads(done.out, parse_constant=refuse)
    return found


def evaluated(setting: Setting) -> Bound:
    """Its bound."""
    found = bound.evaluate(setting)
    assert isinstance(found, Bound)
    return found


def trained(
    folder: Path,
    *,
    estimated: bool = True,
    running: float = 0.0,
    delay: int | None = None,
    **changed: object,
) -> Path:
    """The folder of a training of 25 rounds that lost (0.3 + 0.1)^2 to clipping and rounding."""
    constant: dict[str, Any] = {
        "optimizer": "sgd",
        "lr": 0.01,
        "final_lr": 1.0,
        "warmup": 0,
        "steps": 100,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip_grad": 0.0,
        "strategy": "co2.published:tau=4",
        "outer": {"clip": "0.1", "gap": "constant"},
        **changed,
    }
    rule = {"outer_momentum": 0.5, "outer_lr": 0.7, "penalty": 1.0, "clip": 0.1, "staleness": 1}
    rule |= {"residual_decay": 0.9} if running else {}
    rule |= {"fragments": 4} if delay else {}
    record = {
        "settings": TrainSettings(**constant).to_dict(),
        "facts": {"workers": 2, "outer_step": rule | {"gap": "constant"}},
    }
    estimate = {"smoothness": 2.0, "noise": {"value": 1.0}, "gap": {"value": 3.0}}
    (folder / RECORD).write_text(json.dumps(record))
    if estimated:
        (folder / ESTIMATE).write_text(json.dumps(estimate))
    known = {"step": 100, "tokens": 1, "seconds": 1.0, "train_loss": 1.0, "lr": 0.01, "rounds": 25}
    known |= {"delay": delay} if delay else {}
    log = Log(folder)
    log.add(LogRow(**known, clip_residual=0.09, rounding_residual=0.01, running_residual=running))
    log.close()
    return folder


# --- bound ---------------------------------------------------------------------------------------


def test_bound_takes_setting_constants_and_residual_of_a_training(
    co2analysis: Command, tmp_path: Path
) -> None:
    """The terms are those of its setting; the residual is in units of one gradient."""
    found = answer(co2analysis, "bound", "--run", str(trained(tmp_path)))
    setting = Setting(
        smoothness=2.0,
        noise=1.0,
        gap=3.0,
        workers=2,
        rounds=25,
        local_steps=4,
        inner_step=0.01,
        outer_step=0.7,
        momentum=0.5,
    )
    assert found["bound"] == pytest.approx(
        asdict(evaluated(setting)) | {"total": evaluated(setting).total}
    )
    unit = 0.01 * 4 * 25**0.5
    wanted = {"clipping": 0.3 / unit, "rounding": 0.1 / unit, "clip_residual": 0.4 / unit}
    wanted |= {"decay": 0.0}
    assert found["run"].pop("notes") == []
    assert found["run"].pop("running") is None
    assert found["run"] == pytest.approx(wanted)


def test_what_theorem_1_does_not_cover_of_a_training_is_said(
    co2analysis: Command, tmp_path: Path
) -> None:
    """With half kept the bound is that without the residual, and a note says so."""
    strategy = "co2:tau=4,delay=1,fragments=4,keep=0.5"
    folder = trained(tmp_path, strategy=strategy, outer={"clip": "0.1"}, delay=1)
    found = answer(co2analysis, "bound", "--run", str(folder))
    assert "clipping" not in found
    assert found["fragments"]["count"] == 4
    assert any("keep is 0.5" in note for note in found["run"]["notes"])


def test_a_training_shorter_than_a_round_has_no_bound(co2analysis: Command, tmp_path: Path) -> None:
    """Its steps are fewer than those of a round."""
    folder = trained(tmp_path, strategy="co2.published:tau=101")
    done = co2analysis("bound", "--run", str(folder))
    assert (done.code, done.out) == (2, "")
    assert "100 steps" in done.err


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("", {}),
        ("--delay=2rounds", {"delay": 2}),
        ("--delay=8steps --convex", {"late": co2(8), "convex": True}),
        ("--delay=3 --keep=0.5 --predict=0.25", {"late": Late(steps=3, keep=0.5, predict=0.25)}),
        ("--delay=2 --fragments=4", {"late": replace(co2(2), fragments=4)}),
        (
            "--heterogeneity=0.3 --outer-step=0.5 --momentum=0.25 --penalty=2",
            {"heterogeneity": 0.3, "outer_step": 0.5, "momentum": 0.25, "penalty": 2.0},
        ),
        ("--most-penalty=3", {"most_penalty": 3.0}),
    ],
)
def test_bound_is_that_of_the_setting_that_is_meant(
    co2analysis: Command, words: str, change: dict[str, object]
) -> None:
    """The four terms, the load and the largest step; CO2 is the default."""
    found = answer(co2analysis, *BOUND, "--inner-step", "0.001", *words.split())
    setting = replace(SETTING, inner_step=0.001, **change)  # type: ignore[arg-type]
    expected = evaluated(setting)
    assert found["bound"] == pytest.approx(
        {name: getattr(expected, name) for name in (*bound.TERMS, "total")}, rel=1e-12
    )
    assert found["load"] == pytest.approx(bound.load(setting))
    assert found["largest_inner_step"] == pytest.approx(bound.largest_inner_step(setting))
    assert (found["feasible"], found["tuned"]) == (True, False)
    published = bound.published(replace(setting, delay=0, late=None))
    assert found["slowmo_published"] == (published if isinstance(published, float) else None)
    if late := setting.late:
        waiting = bound.drift(replace(setting, late=None))
        assert found["drift_over_waiting"] == pytest.approx(bound.drift(setting) / waiting)
        assert found["mean_over_all_steps"] == pytest.approx(
            expected.total * late.counted(8) / (8 * late.keep)
        )


def test_a_strategy_says_rounds_and_averages(co2analysis: Command) -> None:
    """The same answer as of the options; fragments stand beside the model as one."""
    rest = ("--inner-step", "0.001")
    told = answer(
        co2analysis, *BOUND[:-2], "--strategy", "co2:tau=8,delay=2,fragments=4,keep=0.5", *rest
    )
    assert told == answer(
        co2analysis, *BOUND, "--delay", "2", "--fragments", "4", "--keep", "0.5", *rest
    )
    late = Late(steps=8, keep=0.5, predict=0.5)
    whole = evaluated(replace(SETTING, inner_step=0.001, late=late))
    assert told["fragments"]["whole_delay_steps"] == 8
    assert told["fragments"]["whole_bound"]["total"] == pytest.approx(whole.total)
    for strategy, tau_, delay in (
        ("local_sgd:tau=8", 8, "0"),
        ("co2.published:tau=8", 8, "1 round"),
    ):
        told = answer(co2analysis, *BOUND[:-2], "-s", strategy, *rest)
        words = ("--local-steps", str(tau_), "--delay", delay)
        assert told == answer(co2analysis, *BOUND[:-2], *words, *rest)


def test_without_a_step_the_best_is_taken(co2analysis: Command) -> None:
    """And the text has the same numbers; beyond the condition it says "infeasible"."""
    found = answer(co2analysis, *BOUND)
    best = bound.tuned(SETTING)
    assert found["tuned"]
    assert found["inner_step"] == pytest.approx(best.inner_step, rel=1e-6)
    text = co2analysis(*BOUND).out
    assert f"{best.inner_step:.6g}" in text
    assert all(f"{getattr(evaluated(best), name):.6g}" in text for name in bound.TERMS)
    beyond = co2analysis(*BOUND, "--inner-step", "0.03")
    assert (beyond.code, "infeasible" in beyond.out) == (0, True)
    assert "infimum" in co2analysis(*BOUND[:3], "--noise", "0", *BOUND[5:]).out
    assert answer(co2analysis, *BOUND, "--inner-step", "0.03")["bound"] is None


@pytest.mark.parametrize("delay", ["1 round", "0", "3 steps"])
@pytest.mark.parametrize("times", [1.5, 10.0, 1000.0])
def test_an_answer_without_a_bound_names_what_has_one(
    co2analysis: Command, delay: str, times: float
) -> None:
    """A smaller learning rate, and the longest round with this one, if any has a bound."""

    def found(tau: int, gamma: float) -> dict[str, Any]:
        rest = ("--local-steps", str(tau), "--inner-step", f"{gamma:.12g}")
        late = (f"{min(3, tau)} steps", "--keep", "0.5") if "steps" in delay else (delay,)
        return answer(co2analysis, *BOUND[:-2], *rest, "--delay", *late)

    step = times * found(64, 1.0)["largest_inner_step"]
    long = found(64, step)
    assert not long["feasible"]
    largest = long["largest_inner_step"]
    assert f"below {largest:.3g}" in long["why_infeasible"]
    assert found(64, largest * 0.9999)["feasible"]
    assert not found(64, largest * 1.0001)["feasible"]
    shorter = re.search(r"rounds of up to (\d+) local", long["why_infeasible"])
    if shorter:
        assert found(int(shorter[1]), step)["feasible"]
        assert not found(int(shorter[1]) + 1, step)["feasible"]
    else:
        assert not found(1, step)["feasible"]
    assert found(64, largest * 0.9)["why_infeasible"] is None


def test_allowed_delay(co2analysis: Command) -> None:
    """The longest delay that raises the bound by at most that share, as text and as JSON."""
    words = ("--allowed-delay", "0.05")
    found = answer(co2analysis, *BOUND, *words)["allowed_delay"]
    assert isinstance(found, dict)
    steps = found["steps"]
    assert 0 < steps < 8
    prices = {line["delay"]: line["price"] for line in found["delays"]}
    assert prices[f"{steps} step{'s' if steps > 1 else ''}"] <= 0.2
    totals = [
        evaluated(bound.tuned(replace(SETTING, late=co2(d)))).total for d in (steps, steps + 1)
    ]
    waiting = evaluated(bound.tuned(replace(SETTING, delay=0)))
    assert totals[0] <= 1.05 * waiting.total < totals[1]
    assert f"up to {steps} of 8" in " ".join(co2analysis(*BOUND, *words).out.split())


# --- clipping ------------------------------------------------------------------------------------


def test_the_residual_of_a_run(co2analysis: Command) -> None:
    """The bound with it is that of the function, in JSON and as text; of a running mean, too."""
    words = ("--inner-step", "0.001", "--clip-residual", "0.2")
    setting = replace(SETTING, inner_step=0.001)
    for more, decay in (((), 0.0), (("--residual-decay", "0.9"), 0.9)):
        found = answer(co2analysis, *BOUND, *words, *more)
        expected = clipping.with_residual(setting, 0.2, decay=decay)
        assert isinstance(expected, Bound)
        part = found["clipping"]
        assert isinstance(part, dict)
        assert part["bound_with_residual"]["total"] == pytest.approx(expected.total)
        assert found["bound"]["total"] == pytest.approx(evaluated(setting).total)  # type: ignore[index]
        assert f"{expected.total:.6g}" in co2analysis(*BOUND, *words, *more).out
        assert not any("Clipping" in line for line in found["not_covered"])  # type: ignore[attr-defined]


def test_tau_recommends_a_clip() -> None:
    """Of the best tau after each time: it grows with the time, and is in the text."""
    timings = [timing(8, 8.0)]
    (early,), (late,) = (tau.after(PROBLEM, timings, seconds) for seconds in (1e14, 1e16))
    first, second = early.least_phi(0.0), late.least_phi(0.0)
    assert first is not None
    assert second is not None
    assert second / first == pytest.approx(100**0.25, rel=0.1)
    assert f"A clip of phi = {early.least_phi(None):.3g}" in " ".join(shown(timings, 1e14).split())
    assert replace(early, setting=replace(early.setting, late=Late(steps=3))).least_phi(1.0) is None


# --- tau -----------------------------------------------------------------------------------------


def timing(steps: int, seconds: float) -> tau.Timing:
    """A measured round of 8 workers of CO2."""
    return tau.Timing(
        tau=steps, round_time=seconds, exposed=0.0, workers=8, delay=1, source="measured"
    )


def shown(timings: Sequence[tau.Timing], seconds: float) -> str:
    """What `tau` prints of rounds."""
    out = Console(width=250, record=True, file=io.StringIO())
    print_tau(out, tau.advise(PROBLEM, timings, [seconds]))
    return out.export_text()


def test_tau_is_as_short_as_the_network_hides() -> None:
    """With rounds as long as max(tau, 8) seconds, 8 steps are best: shorter ones wait."""
    timings = [timing(steps, max(steps, 8.0)) for steps in (1, 2, 4, 8, 16, 32)]
    choices = tau.after(PROBLEM, timings, 1e6)
    assert tau.best(choices).timing.tau == 8
    assert [choice.rounds for choice in choices] == [125_000] * 4 + [62_500, 31_250]
    assert len(tau.after(PROBLEM, timings, 10.0)) == 4
    why = list(tau.explain(choices, 32))
    assert len(why) == 4
    assert "A tau of 4 takes 50%" in why[2]
    assert "A tau of 16 takes 100%" in why[3]
    assert len(list(tau.explain(choices, 8))) == 5
    assert "try longer" in shown(timings[:4], 1e6)
    assert "try longer" not in shown(timings, 1e6)


def test_time_to_a_target_is_the_first() -> None:
    """The bound reaches the target then, and not one percent earlier; perhaps never."""
    mine = timing(4, 2.0)
    reached = tau.until(PROBLEM, mine, 0.05)
    assert reached is not None
    assert tau.after(PROBLEM, [mine], reached)[0].bound.total <= 0.05
    assert tau.after(PROBLEM, [mine], 0.99 * reached)[0].bound.total > 0.05
    assert tau.until(PROBLEM, mine, 1e-9) is None


@pytest.mark.parametrize(
    ("strategy", "tau_", "workers", "delay"),
    [
        ("co2.published:tau=6", 6, 16, 1),
        ("co2.published:staleness=2,worker=node", 12, 2, 2),
        ("local_sgd:worker=node", 12, 2, 0),
    ],
)
def test_rounds_say_who_averages_when(strategy: str, tau_: int, workers: int, delay: int) -> None:
    """Workers are GPUs or nodes; an average is used after CO2's staleness, or at once."""
    case = Question(cluster="a100-tcp80", model="gpt2-small", strategy=strategy, gpus=16)
    found = tau._simulated(case, tau_)
    assert (found.tau, found.workers, found.delay) == (tau_, workers, delay)
    assert found.round_time > 0
    assert found.fits_in_memory


def test_late_strategies() -> None:
    """A strategy's own delay counts, if it is a number; without one averages are rounds late."""
    assert tau.late_of(parse("co2.published")) is None
    given = tau.late_of(parse("co2:tau=12,delay=3,keep=0.5,predict=0.25"))
    assert given == Late(steps=3, keep=0.5, predict=0.25)
    parts = parse("co2:tau=12,delay=3,fragments=4,keep=1")
    assert tau.late_of(parts) == Late(steps=3, fragments=4)
    open_ = parse("co2:tau=12,delay=3")
    keep, predict = open_.kept()
    assert tau.late_of(open_) == Late(steps=3, keep=keep, predict=predict)
    with pytest.raises(OptionError, match="auto"):
        tau.late_of(parse("co2:tau=12,delay=auto"))
    for other in ("zero3", "ddp", "overlap_local_sgd"):
        with pytest.raises(OptionError, match=other):
            tau.averaging(parse(other))


def test_tau_reads_real_runs(
    co2analysis: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round times are those of the records, in the order of tau; the bound after as many rounds."""
    monkeypatch.chdir(tmp_path)
    for steps in (4, 2):
        write(Path(f"run-{steps}"), measured(f"co2.published(tau={steps},worker=node)"))
    found = answer(co2analysis, *TAU, "run-4", "run-2", "--times", "10 s", "--target", "1")
    timings = tau.measured([Path("run-4"), Path("run-2")])
    assert [one.tau for one in timings] == [2, 4]
    assert [one.workers for one in timings] == [2, 2]
    assert found["timings"] == json.loads(json.dumps([asdict(one) for one in timings]))
    after = tau.after(PROBLEM, timings, 10.0)
    (advice,) = found["after"]  # type: ignore[misc]
    assert advice["best_tau"] == tau.best(after).timing.tau
    assert [c["bound"]["total"] for c in advice["choices"]] == [c.bound.total for c in after]
    assert found["seconds_to_target"] == [tau.until(PROBLEM, one, 1.0) for one in timings]


def test_tau_answers_one_question_as_run_does(co2analysis: Command, cli: Command) -> None:
    """With the same batch the tau that hides is that of `co2sim run`, and so is the batch said."""
    case = ("-c", "a100-tcp80", "-m", "gpt2-small", "-g", "16", "-s", "co2:delay=3")
    case = (*case, "--micro-batch", "1")
    found = answer(co2analysis, *TAU, *case, "--taus", "64", "--times", "10 h")
    code, out, _ = cli("run", *case, "--json")
    run = json.loads(out)
    assert code == 0
    chosen = parse(run["strategy"])
    assert isinstance(chosen, CO2)
    assert found["tau_that_hides"] == chosen.tau
    (one,) = found["timings"]  # type: ignore[misc]
    taken = f"micro-batch {run['micro_batch']} x {run['accumulation']} of 1,024 tokens"
    assert one["source"].endswith(f"{taken}, recompute {run['recompute']}")
    assert one["late"]["steps"] == 3


def test_tau_launches_its_choice(co2analysis: Command) -> None:
    """A row of flags; the script of `realrun train` alone with --launch, and in JSON."""
    case = ("-c", "a100-tcp80", "-m", "gpt2-small", "-g", "16", "-s", "slowmo", "--taus", "4,8")
    words = (*TAU, *case, "--times", "10 h, 1 h")
    found = answer(co2analysis, *words, "--launch")
    (ten, _) = found["after"]  # type: ignore[misc]
    flags = f"--strategy 'slowmo(tau={ten['best_tau']})' \\\n  --batch"
    assert flags in found["launch"]  # type: ignore[operator]
    _, row, _ = co2analysis(*words)
    assert f"\nlaunch: for realrun train: strategy=slowmo(tau={ten['best_tau']}), batch=" in row
    _, script, rest = co2analysis(*words, "--launch")
    assert (script.rstrip("\n"), "least bound" in rest) == (found["launch"], True)


def test_the_search_for_tau_doubles_while_the_longest_is_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With rounds of 1,000 s up to a tau of 512: past the usual ones, and it ends."""
    case = Question(cluster="a100-tcp80", model="gpt2-small", strategy="co2.published", gpus=16)

    def simulated(_case: Question, steps: int) -> tau.Timing:
        return timing(steps, 1000.0 * max(1, steps / 512))

    monkeypatch.setattr(tau, "_simulated", simulated)
    monkeypatch.setattr(tau, "simulated", lambda case, taus: [simulated(case, t) for t in taus])
    found = tau.searched(PROBLEM, case, [1e7])
    assert [one.tau for one in found] == [*tau.USUAL, 512, 1024]
    assert tau.best(tau.after(PROBLEM, found, 1e7)).timing is found[-2]
    assert tau.searched(PROBLEM, case, [10.0])[-1].tau == tau.USUAL[-1]  # no round fits in
    # the shortest round of the strategy, and the tau that hides its averages, are always there
    for words, hides, first in (
        ("co2:delay=1,fragments=12", 14, [12, 14, 16]),
        ("co2:delay=300,fragments=2", 300, [300]),
    ):
        case = Question(cluster="a100-tcp80", model="gpt2-small", strategy=words, gpus=16)
        found = tau.searched(PROBLEM, case, [10.0], hides)
        assert [one.tau for one in found][: len(first)] == first


# --- verify --------------------------------------------------------------------------------------

SMALL = replace(SETTING, rounds=40, workers=3, inner_step=0.002)
VERIFY = (
    *("verify", "--smoothness", "2", "--noise", "1", "--gap", "3", "--workers", "3"),
    *("--rounds", "40", "--local-steps", "8", "--inner-step", "0.002", "--seeds", "8"),
)


@pytest.mark.parametrize("change", [{}, {"heterogeneity": 4.0}, {"gap": 0.0}, {"convex": True}])
def test_verify_runs_problems_with_the_constants_of_the_setting(change: dict[str, Any]) -> None:
    """L is reached, the gap is that of the start, and workers disagree by zeta squared anywhere."""
    setting = replace(SMALL, **change)
    problems = dict(verify.problems(setting))
    assert set(problems) == {"quadratic"} | (set() if setting.convex else {"not convex"})
    points = np.linspace(-10, 10, 20_001)[:, None]
    for name, problem in problems.items():
        assert problem.value(problem.start) == pytest.approx(setting.gap)
        assert disagreement(problem, points, 3) == pytest.approx(setting.heterogeneity)
        slopes = np.diff(problem.gradient(points)[:, 0]) / 0.001
        assert np.abs(slopes).max() == pytest.approx(2.0, rel=1e-4)
        assert bool(slopes.min() > 0) is (name == "quadratic")


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ((), {}),
        (("--delay", "0", "--momentum", "0.5"), {"delay": 0, "momentum": 0.5}),
        (("--delay", "3", "--heterogeneity", "4"), {"late": co2(3), "heterogeneity": 4.0}),
        (("--delay", "1", "--fragments", "8"), {"late": replace(co2(1), fragments=8)}),
        (("--most-penalty", "1.5"), {"most_penalty": 1.5}),
    ],
)
def test_verify_puts_runs_beside_the_bound(
    co2analysis: Command, options: tuple[str, ...], change: dict[str, Any]
) -> None:
    """The bound is that of the setting, the runs are below it, and the text has the numbers."""
    found = answer(co2analysis, *VERIFY, *options)
    expected = evaluated(replace(SMALL, **change)).total
    assert not found["violated"]
    for line in found["problems"]:
        assert line["bound"]["total"] == pytest.approx(expected)
        assert 0 < line["measured"] < expected
        assert line["ratio"] == pytest.approx(line["measured"] / expected)
    text = co2analysis(*VERIFY, *options).out
    assert f"{found['problems'][0]['measured']:.6g}" in text
    assert f"{expected:.6g}" in text


def test_verify_of_a_clip_takes_the_residual_of_its_runs(co2analysis: Command) -> None:
    """The bound is that of Theorem 1, and the runs are below it."""
    for line in answer(co2analysis, *VERIFY, "--phi", "0.5")["problems"]:
        clipped = clipping.with_residual(SMALL, line["clip_residual"])
        assert isinstance(clipped, Bound)
        assert line["clip_residual"] > 0
        assert line["bound"]["total"] == pytest.approx(clipped.total)
        assert line["measured"] < clipped.total


def test_verify_ends_with_1_and_one_line_where_the_bound_is_violated(
    co2analysis: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bound of half what was measured on the quadratic, which the line names."""
    half = answer(co2analysis, *VERIFY)["problems"][0]["measured"] / 2
    wrong = Bound(optimization=half, noise=0.0, staleness=0.0, drift=0.0)
    monkeypatch.setattr(bound, "evaluate", lambda _: wrong)
    done = co2analysis(*VERIFY, "--json")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert "quadratic" in done.err
    assert json.loads(done.out)["violated"]


def test_verify_takes_the_setting_of_a_training(co2analysis: Command, tmp_path: Path) -> None:
    """Its bound is that of `bound --run`; the residual that it recorded is not that of the runs."""
    folder = str(trained(tmp_path))
    expected = answer(co2analysis, "bound", "--run", folder)["bound"]
    for line in answer(co2analysis, "verify", "--run", folder)["problems"]:
        assert line["bound"] == expected
        assert line["clip_residual"] is None


# --- trends --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trends_are_labelled(co2analysis: Command) -> None:
    """Every method trains the network, and the output says what it is not."""
    given = ("trends", "--steps", "8", "--taus", "4", "--seeds", "2", "--by-label")
    found = answer(co2analysis, *given)
    lines = found["trends"]
    assert isinstance(lines, list)
    assert [line["method"] for line in lines] == ["local SGD", "SlowMo", "CO2"]
    for line in lines:
        assert line["loss"] < 2.5 < -math.log(0.01)
        assert 0 < line["error"] < line["measured"]
        assert (line["largest_step"] > line["inner_step"]) is (line["bound"] is not None)
        assert min(line["smoothness"], line["noise"], line["spread"]) > 0
    assert "not a check" in str(found["label"])
