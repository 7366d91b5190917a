"""What a training of a number of tokens takes: time, GPU-hours, money, energy, carbon."""

import csv
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st

from co2sim import Cluster, Goal, Question, Result, run, scale, sweep, totals_of
from co2sim.catalog import load_cluster
from co2sim.prediction import power
from co2sim.prediction.counted import CountedFailures
from co2sim.prediction.driver import trace
from co2sim.prediction.goodput import Shares
from co2sim.prediction.totals import Totals, knee, totals
from co2sim.schedule.schedule import Compute
from co2sim.simulation.metrics import window
from co2sim.studies.targets import METRICS, View

ONE_SAMPLE = ("--micro-batch", "1", "--accumulation", "1")
ON = ("-c", "dgx-h100", "-m", "gpt2-small", *ONE_SAMPLE)
PRICED = ("--set", "price_per_gpu=h100-median-2026-05", "--set", "grid=france", "--set", "pue=1.2")
CASE = Question(cluster="dgx-h100", model="gpt2-small", strategy="ddp", gpus=16)
RESULT = run(CASE)
DRAWS = st.floats(0.0, 1.0)


def cluster(**changes: object) -> Cluster:
    """Two nodes of eight GPUs with round numbers for all that costs."""
    whole = load_cluster("dgx-h100").value.resized(16)
    gpu = replace(whole.gpu, tdp=400.0, idle_power=100.0)
    numbers = {
        "gpu": gpu,
        "price_per_gpu": 1 / 3600,
        "price_low": None,
        "price_high": None,
        "node_power": 1000.0,
        "pue": 1.5,
        "grid_intensity": 0.1,
        "grid_intensity_low": None,
        "grid_intensity_high": None,
    }
    return replace(whole, **(numbers | changes))  # type: ignore[arg-type]


def result(exposed: float = 0.25, **changes: object) -> Result:
    """1,000 tokens/s on 16 GPUs at 1 USD an hour each; a part of the round is exposed."""
    numbers = {
        "tokens_per_s": 1000.0,
        "round_time_s": 2.0,
        "exposed_comm_s": 2.0 * exposed,
        "straggler_delay_s": None,
        "tokens_per_s_low": None,
        "tokens_per_s_high": None,
        "cost_per_billion_tokens": 16 / 3600 / 1000 * 1e9,
        "currency": "USD",
    }
    return replace(RESULT, **(numbers | changes))  # type: ignore[arg-type]


def failing(useful: float, low: float, high: float) -> CountedFailures:
    """Failures that leave a share of the time, and lose the rest."""
    shares = Shares(useful=useful, checkpoint=0.0, lost=1 - useful, restart=0.0, waiting=0.0)
    return CountedFailures(name="", shares=shares, low=low, high=high, every=1e5, assumed=False)


def known(found: Totals | None) -> Totals:
    """Totals that are known."""
    return found


def test_a_day_worked_out_by_hand() -> None:
    """Every figure of one case, from numbers that fit on a slip of paper.

    86.4 million tokens at 1,000 a second take a day. 16 GPUs for 24 hours are 384 GPU-hours, at
    1 USD each. A GPU computes for 3/4 of the time at 85 % of 400 W and waits at 100 W: 280 W. 16
    of them and twice 1,000 W are 6,480 W, times 1.5: 9,720 W, in 24 h 233.28 kWh, at 0.1 kg each.
    """
    found = known(totals(result(), cluster(), 86.4e6))
    assert (found.tokens, found.trained, found.goodput) == (86.4e6, 86.4e6, 1.0)
    assert found.days == pytest.approx(1.0)
    assert found.gpu_hours == pytest.approx(384.0)
    assert found.cost == pytest.approx(384.0)
    assert found.power_w == pytest.approx(9720.0)
    assert found.energy_kwh == pytest.approx(233.28)
    assert found.co2e_kg == pytest.approx(23.328)
    assert (found.currency, found.missing) == ("USD", ())
    assert {found.days_low, found.cost_low, found.energy_kwh_high, found.co2e_kg_low} == {None}


def test_intervals_join_that_of_the_speed_with_the_range_of_the_rate() -> None:
    """Fast and cheap is the low end, slow and dear the high one."""
    uncertain = result(tokens_per_s_low=500.0, tokens_per_s_high=2000.0)
    wide = cluster(price_low=0.5 / 3600, price_high=3 / 3600, grid_intensity_high=0.4)
    found = known(totals(uncertain, wide, 86.4e6))
    assert (found.days_low, found.days_high) == pytest.approx((0.5, 2.0))
    assert (found.cost_low, found.cost_high) == pytest.approx((384 / 4, 384 * 6))
    assert (found.energy_kwh_low, found.energy_kwh_high) == pytest.approx((116.64, 466.56))
    assert (found.co2e_kg_low, found.co2e_kg_high) == pytest.approx((11.664, 186.624))
    exact = known(totals(result(), wide, 86.4e6))  # no interval of the speed: the price's alone
    assert (exact.days_low, exact.days_high) == (None, None)
    assert (exact.cost_low, exact.cost_high) == pytest.approx((192.0, 1152.0))


def test_the_range_of_the_step_factor_widens_the_interval_as_a_product_of_errors() -> None:
    """Ends are quantiles of a product of two lognormal factors; those of the price come then."""
    wide = cluster(price_low=0.5 / 3600, price_high=3 / 3600)
    numbers = {"strategy": "diloco(tau=30)", "parameters": 2_000_000_000, "workers": 4}
    uncertain = result(tokens_per_s_low=800.0, tokens_per_s_high=1250.0, **numbers)
    found = known(totals(uncertain, wide, 86.4e6))
    low, high = found.factor.ends
    assert low < 1 < high
    rng = np.random.default_rng(0)
    z = 1.6448536269514722  # of 5 % beyond
    times = np.exp(rng.normal(size=400_000) * np.log(1.25) / z)
    times *= np.exp(rng.normal(size=400_000) * np.log(high) / z)
    ends = np.quantile(times, [0.05, 0.95])
    assert low * high == pytest.approx(1)  # the law's range is even
    assert found.days_low == pytest.approx(found.days * ends[0], rel=5e-3)
    assert found.days_high == pytest.approx(found.days * ends[1], rel=5e-3)
    assert found.cost_low == pytest.approx(found.cost * found.days_low / found.days / 2)
    alone = known(totals(result(**numbers), cluster(), 86.4e6))
    assert (alone.days_low, alone.days_high) == pytest.approx((alone.days * low, alone.days * high))


def test_solve_has_the_ends_of_totals() -> None:
    """At both ends of tokens/s a view takes the days that totals have there."""
    uncertain = result(tokens_per_s_low=800.0, tokens_per_s_high=1300.0)
    numbers = {"strategy": "diloco(tau=30)", "parameters": 2_000_000_000, "workers": 4}
    uncertain = replace(uncertain, **numbers)  # type: ignore[arg-type]
    found = known(totals(uncertain, cluster(), 1e9, failures=failing(0.8, 0.7, 0.9)))
    view = View(
        uncertain,
        tokens=found.trained,
        goodput=(0.8, 0.7, 0.9),
        factor_ends=found.factor.ends,
        cluster=cluster(),
    )
    for end, days, cost in (
        ("low", found.days_high, found.cost_high),
        ("high", found.days_low, found.cost_low),
        ("predicted", found.days, found.cost),
    ):
        moved = view.at(end)  # type: ignore[arg-type]
        assert METRICS["days"].of(moved) == pytest.approx(days)
        assert METRICS["cost"].of(moved) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("strategy", "bandwidth"),
    [
        *(("ddp", "10 Gbit/s"), ("zero3", "3200 Gbit/s"), ("fsdp", "10 Gbit/s")),
        *(
            ("zero1", "3200 Gbit/s"),
            ("co2.published(tau=3)", "10 Gbit/s"),
            ("diloco(tau=2)", "3200 Gbit/s"),
        ),
    ],
)
def test_the_power_is_that_of_the_trace_integrated(strategy: str, bandwidth: str) -> None:
    """Watts times seconds over the spans of one GPU, computing or not, give the same average."""
    overrides = {"inter.bandwidth": bandwidth, "interference": "0", "node_spread": "0"}
    case = replace(CASE, strategy=strategy, overrides=overrides)
    schedule, spans = trace(case)
    found = run(case)
    during = window(spans, schedule, 1)
    computes = {op.name for op in schedule.body if isinstance(op.work, Compute)}
    own = [s for s in spans.spans if s.rank == 0 and s.op in computes]
    busy = sum(max(0.0, s.end - max(s.start, during.start)) for s in own)
    length = during.round_time
    assert length == pytest.approx(found.round_time_s)
    gpu = case.load()[0].value.gpu
    joules = busy * 0.85 * 700 + (length - busy) * 105
    share = power.computing_share(found)
    assert power.gpu_power(gpu, share) == pytest.approx(joules / length, rel=1e-6)


@given(exposed=DRAWS, more=DRAWS, straggled=DRAWS)
def test_power_lies_between_idle_and_computing(
    exposed: float, more: float, straggled: float
) -> None:
    """And never rises with what is exposed."""
    rest = cluster(node_power=0.0, pue=1.0)
    low, high = sorted((exposed, more))
    first, second = (
        power.power(result(share, straggler_delay_s=straggled), rest) for share in (low, high)
    )
    assert 16 * 100.0 * (1 - 1e-12) <= second <= first * (1 + 1e-12)
    assert first <= 16 * 340.0 * (1 + 1e-12)


@given(tokens=st.floats(1, 1e18), goodput=st.floats(0.01, 1.0), factor=st.floats(0.1, 10.0))
def test_all_grows_with_tokens_and_steps_and_falls_with_goodput(
    tokens: float, goodput: float, factor: float
) -> None:
    """Time, money, energy and carbon are in proportion to tokens times factor over goodput."""
    one = known(totals(result(), cluster(), 1e6))
    goal = Goal(factors={"co2.published(tau=48)": factor})
    local = result(strategy="co2.published(tau=48)")
    found = known(totals(local, cluster(), tokens, goal, failing(goodput, goodput, goodput)))
    times = tokens / 1e6 * factor / goodput
    for name in ("days", "gpu_hours", "cost", "energy_kwh", "co2e_kg"):
        assert getattr(found, name) == pytest.approx(times * getattr(one, name), rel=1e-9)
    assert found.power_w == one.power_w
    assert found.trained == pytest.approx(tokens * factor)


@pytest.mark.parametrize(
    ("lacks", "gone"),
    [
        ("price_per_gpu", {"cost", "currency"}),
        ("node_power", {"power_w", "energy_kwh", "co2e_kg"}),
        ("pue", {"power_w", "energy_kwh", "co2e_kg"}),
        ("grid_intensity", {"co2e_kg"}),
    ],
)
def test_a_number_that_is_not_known_is_named_and_nothing_rests_on_it(
    lacks: str, gone: set[str]
) -> None:
    """No figure is made up, and the others stay."""
    bare = cluster(**{lacks: None})
    price = {"cost_per_billion_tokens": None, "currency": None} if lacks == "price_per_gpu" else {}
    found = known(totals(result(**price), bare, 1e9))
    whole = known(totals(result(), cluster(), 1e9))
    assert found.missing == (lacks,)
    for name in ("days", "gpu_hours", "cost", "currency", "power_w", "energy_kwh", "co2e_kg"):
        assert getattr(found, name) == (None if name in gone else getattr(whole, name))
    gpu = replace(bare.gpu, tdp=None, idle_power=None)
    assert {"gpu.tdp", "gpu.idle_power"} <= set(
        known(totals(result(**price), replace(bare, gpu=gpu), 1e9)).missing
    )


def test_a_node_of_h100_draws_what_was_measured_elsewhere() -> None:
    """Within 5 % of 76 % of 10.2 kW (Newkirk et al., arXiv 2506.14551), which no constant uses."""
    node = load_cluster("dgx-h100", {"pue": "1"}).value.resized(8)
    found = power.power(result(0.0, gpus=8), node)
    assert found == pytest.approx(0.76 * 10_200, rel=0.05)


def test_a_price_is_set_by_name_and_what_a_user_gives_has_no_range() -> None:
    """A range belongs to the price that was published with it."""
    named = load_cluster("dgx-h100", {"price_per_gpu": "h100-median-2026-05"}).value
    assert (named.price_per_gpu, named.price_low, named.price_high, named.currency) == (
        pytest.approx(2.95 / 3600),
        pytest.approx(1.99 / 3600),
        pytest.approx(5 / 3600),
        "USD",
    )
    own = load_cluster("dgx-h100", {"price_per_gpu": "2 EUR/h"}).value
    assert (own.price_low, own.price_high, own.currency) == (None, None, "EUR")
    both = {"price_per_gpu": "2 EUR/h", "price_low": "1 EUR/h", "price_high": "3 EUR/h"}
    assert load_cluster("dgx-h100", both).value.price_high == pytest.approx(3 / 3600)
    grid = load_cluster("dgx-h100", {"grid_intensity": "20 g/kWh"}).value
    assert (grid.grid_intensity, grid.grid_intensity_high) == (pytest.approx(0.02), None)


@pytest.mark.slow
def test_run_sweep_scale_and_python_say_the_same(cli: Command, tmp_path: Path) -> None:
    """JSON, both CSV files, both frames and `totals_of` have the same figures."""
    table, out = tmp_path / "sweep.csv", tmp_path / "out"
    overrides = {"price_per_gpu": "h100-median-2026-05", "grid": "france", "pue": "1.2"}
    case = replace(CASE, overrides=overrides)
    expected = asdict(known(totals_of(case, run(case), 1e10)))
    common, one = (*ON, *PRICED, "--tokens", "1e10"), ("-g", "16", "--jobs", "1")
    code, text, _ = cli("run", *common, "-s", "ddp", "-g", "16", "--json")
    assert code == 0
    said = json.loads(text)["totals"]
    basis = {fact["path"]: fact for fact in said.pop("basis")}
    assert said == json.loads(json.dumps(expected))
    assert basis["grid_intensity"]["source"].startswith("france, 2023: Our World in Data")
    assert (basis["pue"]["value"], basis["pue"]["assumed"]) == ("1.2", False)
    assert cli("sweep", *common, "--vary", "strategy=ddp", *one, "--csv", str(table))[0] == 0
    assert cli("scale", *common, "-s", "ddp", *one, "--out", str(out))[0] == 0
    python: dict[str, Any] = {"overrides": overrides, "tokens": 1e10}
    python |= {"micro_batch": 1, "accumulation": 1}
    frames = [
        sweep("dgx-h100", "gpt2-small", vary={"strategy": "ddp"}, gpus=16, **python),
        scale("dgx-h100", "gpt2-small", "ddp", gpus=[16], **python),
    ]
    files = (table, out / "scale.csv")
    rows = [next(csv.DictReader(path.read_text().splitlines())) for path in files]
    for name in ("trained", "days", "gpu_hours", "cost", "cost_low", "energy_kwh", "co2e_kg"):
        for row in (*rows, *(frame.iloc[0] for frame in frames)):
            assert float(row[name]) == pytest.approx(expected[name])


@given(st.lists(st.tuples(st.floats(1, 1e3), st.floats(1, 1e6)), min_size=1, max_size=6))
def test_no_option_gains_as_much_against_the_best_trade_as_it_loses(
    pairs: list[tuple[float, float]],
) -> None:
    """What saves money by a factor takes longer by a larger one, and the other way round."""
    plain = totals(result(), cluster(), 1e9)
    options = [replace(plain, days=days, cost=cost) for days, cost in pairs]
    best, cost = pairs[knee(options)]
    for other, price in pairs:
        assert cost / price <= other / best * (1 + 1e-12)
