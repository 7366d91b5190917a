"""The public API: one question in, figures out, with warnings and notes."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from one_sample import simulate

from co2sim import DDP, Question, Result
from co2sim.hardware.cluster import Cluster, Link
from co2sim.prediction import driver
from co2sim.simulation.noise import Noise

SMALL: dict[str, Any] = {"cluster": "a100-tcp80", "model": "gpt2-small", "gpus": 16}


@pytest.mark.parametrize("strategy", ["ddp", "zeropp", "co2.published(tau=12)", "diloco(tau=20)"])
def test_the_figures_of_a_result_agree_with_each_other(strategy: str) -> None:
    """Totals, rates per GPU, steps, rounds and memory are one set of numbers."""
    found = simulate(strategy=strategy, micro_batch=2, accumulation=3, **SMALL)
    assert found.step_time_s * found.steps_per_round == pytest.approx(found.round_time_s)
    assert found.samples_per_s == pytest.approx(16 * 2 * 3 / found.step_time_s)
    assert found.tokens_per_s == pytest.approx(1024 * found.samples_per_s)
    assert found.tokens_per_s_per_gpu == pytest.approx(found.tokens_per_s / 16)
    assert found.mfu == pytest.approx(found.model_tflops_per_gpu * 1e12 / 312e12)
    assert found.hardware_tflops_per_gpu >= found.model_tflops_per_gpu
    assert 0 <= found.exposed_comm_s <= found.comm_busy_s * (1 + 1e-9)
    assert found.overlap_ratio == pytest.approx(1 - found.exposed_comm_s / found.comm_busy_s)
    items = {name: size for name, size in found.memory_bytes_per_gpu.items() if name != "total"}
    assert sum(items.values()) == pytest.approx(found.memory_bytes_per_gpu["total"])
    assert found.fits_in_memory == (found.memory_bytes_per_gpu["total"] <= 80e9)
    assert found.steady


def test_a_global_batch_sets_the_accumulation() -> None:
    """192 samples on 16 GPUs of 4: three micro-steps; the step sees 192 samples."""
    found = simulate(strategy="zero2", micro_batch=4, global_batch=192, **SMALL)
    assert found.accumulation == 3
    assert found.samples_per_s * found.step_time_s == pytest.approx(192)


def test_a_price_keeps_its_currency() -> None:
    """What a cluster costs in euros is never called dollars, and nothing is converted."""
    found = simulate(tiny.cluster(price_per_gpu=1e-3, currency="EUR"), tiny.model(), "ddp")
    assert found.cost_per_billion_tokens == pytest.approx(1e9 / found.tokens_per_s * 4 * 1e-3)
    assert (found.currency, found.usd_per_billion_tokens) == ("EUR", None)
    dollars = simulate(tiny.cluster(price_per_gpu=1e-3), tiny.model(), "ddp")
    assert dollars.usd_per_billion_tokens == dollars.cost_per_billion_tokens
    assert dollars.currency == "USD"


def test_a_gpu_without_bf16_trains_in_fp16() -> None:
    """V100 has no bf16."""
    assert simulate("dgx2-ib1", "gpt2-small", "ddp", gpus=16).precision == "fp16"


def test_in_the_steady_state_the_number_of_rounds_does_not_matter() -> None:
    """Averaging more rounds of a steady state changes nothing, with a straggler too."""
    for strategy in ("ddp", "co2.published(tau=2,staleness=2)", "zeropp"):
        case: dict[str, Any] = {**SMALL, "strategy": strategy, "node_speed": {1: 0.5}}
        one = simulate(**case)
        for rounds in (1, 2, 5, 100):
            more = simulate(rounds=rounds, **case)
            assert (more.steady, more.rounds_simulated >= rounds) == (True, True)
            assert more.round_time_s == pytest.approx(one.round_time_s, rel=1e-9)


@pytest.mark.parametrize("tau", [2, 20])
def test_communication_beside_compute_repeats_from_round_to_round(tau: int) -> None:
    """The last average of a run has no steps beside it: it is not what is measured."""
    links = {"inter.busy_efficiency": "0.5", "inter.bandwidth": "3 Gbit/s"}
    for strategy in (
        f"co2.published(tau={tau})",
        f"co2.published(tau={tau},worker=node,average=leader)",
    ):
        case: dict[str, Any] = {**SMALL, "strategy": strategy, "overrides": links}
        one = simulate(**case)
        assert one.steady
        assert one.rounds_simulated < 10
        assert simulate(rounds=5, **case).round_time_s == pytest.approx(one.round_time_s, rel=1e-9)
        quick = simulate(**{**case, "overrides": links | {"inter.busy_efficiency": "1"}})
        assert quick.round_time_s <= one.round_time_s
        slow = simulate(**{**case, "overrides": links | {"inter.bandwidth": "1.5 Gbit/s"}})
        assert one.round_time_s <= slow.round_time_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("cluster", "strategy"),
    [
        *(("a100-roce800", "ddp"), ("a100-tcp80", "zero3"), ("dgx-h100", "zeropp(chunks=4)")),
        *(("a100-tcp80", "fsdp"), ("dgx-h100", "zero1"), ("a100-roce800", "zeropp")),
    ],
)
def test_where_rounds_are_apart_one_is_like_all(
    monkeypatch: pytest.MonkeyPatch, cluster: str, strategy: str
) -> None:
    """A case gives what it gives when rounds before it, and behind it, are simulated, too."""
    case = Question(cluster=cluster, model="gpt2-xl", strategy=strategy, gpus=16, accumulation=2)
    quick = driver.run(case)
    monkeypatch.setattr("co2sim.simulation.run._repeats", lambda *_: False)
    long = driver.run(case)
    assert long.steady
    assert quick.steady
    assert quick.rounds_simulated < long.rounds_simulated or strategy == "zero1"
    for name in {field.name for field in fields(Result)} - {"rounds_simulated"}:
        value = getattr(long, name)
        near = pytest.approx(value, rel=1e-9) if isinstance(value, float | dict) else value
        assert getattr(quick, name) == near, name


# --- what is kept ---------------------------------------------------------------------------------

KEPT = Question(cluster="dgx-h100", model="gpt2-small", strategy="zero3", gpus=16)


def test_a_schedule_is_built_once_for_clusters_of_one_layout() -> None:
    """Another bandwidth has the same schedule; another size, batch, model or option has not."""
    schedule = KEPT.stage().schedule
    faster = replace(KEPT, overrides={"inter.bandwidth": "1 Tbit/s"})
    assert faster.stage().schedule is schedule
    for other in (
        replace(KEPT, gpus=32),
        replace(KEPT, micro_batch=2),
        replace(KEPT, model="gpt2-medium"),
        replace(KEPT, strategy="zero3(prefetch=7)"),
        replace(KEPT, precision="fp16"),
    ):
        assert other.stage().schedule != schedule


def test_no_result_depends_on_what_was_simulated_before() -> None:
    """Cases in turn give what each gave first, by text or as an object."""
    cases = [
        replace(KEPT, strategy=strategy, gpus=gpus)
        for strategy in (
            "ddp(bucket_mib=30)",
            DDP(bucket_mib=30),
            "zeropp",
            "fsdp",
            "co2.published(tau=4)",
        )
        for gpus in (8, 16)
    ]
    first = [driver.run(case) for case in cases]
    assert [driver.run(case) for case in reversed(cases)] == first[::-1]


def test_the_low_end_of_memory_is_at_least_the_states() -> None:
    """Parameters, gradients and optimizer are certain: DDP of 8B fits no GPU of 85 GB."""
    found = simulate("dgx-h100", "llama3-8b", "ddp", gpus=8)
    states = 16 * found.parameters
    assert found.memory_bytes_low >= states > found.gpu_memory_bytes
    assert found.memory_fit == "does not fit"


# --- warnings and notes -----------------------------------------------------------------------


SLOW = {"inter": Link(1e8)}


def on_slow(strategy: str, **changes: Any) -> Result:
    """The tiny model, whose largest block has 640 parameters, on a slow network."""
    return simulate(tiny.cluster(**SLOW), tiny.model(), strategy, **changes)


def of(nodes: int, **changes: Any) -> Cluster:
    """Nodes of eight tiny GPUs."""
    return tiny.cluster(nodes, 8, **changes)


# --- warnings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("small", "large", "tokens"),
    [
        ("zero3(prefetch=100)", "zero3(prefetch=640)", ["4 of 4 blocks", "prefetch=640 "]),
        (
            "zero3(prefetch=640,max_live=700)",
            "zero3(prefetch=640,max_live=1140)",
            ["3 of 3 blocks", "1,140 parameters", "max_live=1140 "],
        ),
        (
            "zero3(prefetch=100,max_live=700)",
            "zero3(prefetch=640,max_live=1140)",
            ["prefetch=640,max_live=1140 "],
        ),
    ],
)
def test_a_budget_below_the_largest_block_is_named_with_a_better_one(
    small: str, large: str, tokens: list[str]
) -> None:
    """Which blocks, the options that are enough, and the speed that they give."""
    found, better = on_slow(small), on_slow(large)
    assert better.tokens_per_s > found.tokens_per_s
    (line,) = found.warnings
    assert all(token in line for token in tokens), line
    assert f" {better.tokens_per_s:,.0f} " in line
    assert f" {found.tokens_per_s:,.0f}:" in line
    assert better.warnings == ()


@pytest.mark.parametrize("strategy", ["zero3", "fsdp", "ddp", "co2.published(worker=node)"])
def test_there_is_no_warning_without_a_cause(strategy: str) -> None:
    """Blocks below the budget, other strategies, a GPU that is alone, a network of no cost."""
    assert on_slow(strategy).warnings == ()
    fast = tiny.cluster(intra=Link(1e18), inter=Link(1e18))
    for cluster in (tiny.cluster(1, 1), fast):
        assert simulate(cluster, tiny.model(), "zero3(prefetch=0)").warnings == ()


# --- notes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["interference", "node_spread", "step_spread", "straggle"])
def test_a_number_that_counts_costs_of_scale_takes_the_note_away(number: str) -> None:
    """Any of three of the cluster, and uneven ranks."""
    straggle = number == "straggle"
    cluster = of(17) if straggle else of(17, **{number: 0.02})
    noise = Noise(straggle=0.1 * straggle)
    assert simulate(cluster, tiny.model(), "fsdp", noise=noise).notes == ()


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("8 DGX H100 of 8 H100-80GB, InfiniBand", "2 DGX H100 of 8 H100-80GB, InfiniBand"),
        ("4 sites of 16 nodes of 8 H100", "4 sites of 16 nodes of 8 H100"),
    ],
)
def test_the_name_of_a_cluster_has_the_nodes_of_the_job_and_its_own_sites(
    name: str, place: str
) -> None:
    """So that no header says of four sites that they are as many as the nodes."""
    result = simulate("dgx-h100", "gpt2-small", "ddp", gpus=16, micro_batch=1, accumulation=1)
    assert replace(result, cluster=name).place == place


def warned(tmp_path: Path, rate: str) -> bool:
    """Whether a cluster file of 8 H100 a node with this rate between nodes gets a warning."""
    path = tmp_path / "offer.toml"
    text = (
        'name = "an offer"\nsource = "none"\nnodes = 8\ngpus_per_node = 8\ngpu = "h100"\n'
        '[intra]\nbandwidth = "450 GB/s"\nefficiency = 0.8\nlatency = "3 us"\n'
        f'[inter]\nbandwidth = "{rate}"\nefficiency = 0.9\nlatency = "10 us"\n'
    )
    path.write_text(text)
    found = driver.run(Question(cluster=str(path), model="gpt2-small", strategy="ddp", gpus=16))
    return any("bandwidth" in text for text in found.warnings)


def test_a_power_cap_below_what_was_measured_gets_a_warning() -> None:
    """Below 0.6 of the limit of 700 W, and not at it."""
    for watts, expected in (("420 W", ()), ("300 W", ("gpu.power_cap is 43% of 700 W",))):
        case = Question(
            cluster="dgx-h100",
            model="gpt2-small",
            strategy="ddp",
            gpus=16,
            overrides={"gpu.power_cap": watts},
        )
        assert tuple(text.partition(":")[0] for text in driver.run(case).warnings) == expected


def test_the_rate_of_a_gpu_that_is_given_for_a_node_gets_a_warning(tmp_path: Path) -> None:
    """In a file by what most clusters of the catalog have; else by what the cluster itself has."""
    assert warned(tmp_path, "400 Gbit/s")
    assert not warned(tmp_path, "100 Gbit/s")
    assert not warned(tmp_path, "3200 Gbit/s")
    for cluster, rate, expected in (
        ("dgx-h100", "400 Gbit/s", True),
        ("dgx-h100", "200 Gbit/s", False),
        ("dgx-a100", "200 Gbit/s", True),
        ("dgx-a100", "400 Gbit/s", False),
        ("a100-tcp80", "10 Gbit/s", True),
    ):
        given = Question(
            cluster=cluster,
            model="gpt2-small",
            strategy="ddp",
            gpus=16,
            overrides={"inter.bandwidth": rate},
        )
        assert any("bandwidth" in text for text in driver.run(given).warnings) == expected
    plain = Question(cluster="p4d.24xlarge", model="gpt2-small", strategy="ddp", gpus=16)
    assert not driver.run(plain).warnings
