"""The local-update family on several ranks, against plain transcriptions and against itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference_local_update as reference  # noqa: E402 - needs torch
from local_problem import RATE  # noqa: E402 - needs torch
from numpy.typing import NDArray  # noqa: E402
from ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.dist

MODULE = "algorithm_workers"
ROUNDS = 6
CLOSE = 2e-6
"""What float32 may be off after 6 rounds in which elements move by 0.1 to 1."""


def case(algorithm: str, inner: str = "sgd", model: str = "float32", **options: Any) -> Any:
    """A case for ranks and reference."""
    rounds = options.pop("rounds", ROUNDS)
    options.setdefault("bucket_mib", 1e-4)
    if algorithm == "CO2" and "delay" not in options:
        options = {"outer_momentum": 0.5, "outer_lr": 1.0, **options}
    return {
        "algorithm": algorithm,
        "inner": inner,
        "rounds": rounds,
        "model": model,
        "options": options,
    }


CASES = [
    *(
        case("CO2", inner, tau=tau, staleness=k, outer_momentum=beta, outer_lr=alpha, gap=gap)
        for (inner, tau), (k, beta, alpha), gap in (
            (("sgd", 1), (1, 0.5, 1.0), "gap_aware"),
            (("sgd", 4), (1, 0.9, 0.7), "constant"),
            (("adamw", 3), (1, 0.5, 0.5), "gap_aware"),
            (("adamw", 3), (2, 0.5, 0.7), "gap_aware"),
            (("momentum", 2), (3, 0.3, 0.5), "gap_aware"),
            (("sgd", 3), (2, 0.0, 1.0), "constant"),
            (("momentum", 3), (3, 0.5, 0.4), "constant"),
        )
    ),
    case("CO2", "sgd", tau=3, gap="constant", penalty=1.7),
    case("CO2", "adamw", tau=3, clip=0.04),
    case("CO2", "sgd", tau=3, clip=0.03, staleness=2),
    *(
        case("CO2", inner, tau=tau, delay=d, keep=keep, predict=predict)
        for inner, tau, d, keep, predict in (
            ("adamw", 4, 1, 0.5, 0.5),
            ("sgd", 4, 3, 1.0, 0.0),
            ("momentum", 3, 3, 0.25, 0.75),
            ("adamw", 1, 1, 1.0, 0.0),
        )
    ),
    case("CO2", "adamw", tau=4, delay=1, fragments=4, predict=0.5, keep=0.5),
    case("CO2", "sgd", tau=5, delay=4, fragments=2, keep=0.75, predict=0.25),
    case(
        "CO2",
        "sgd",
        tau=3,
        delay=2,
        keep=0.5,
        predict=0.0,
        clip=0.04,
        outer_momentum=0.5,
        outer_lr=0.8,
    ),
    *(
        case("CO2", inner, delay=d, preview=True, outer_momentum=0.9, outer_lr=0.1, **more)
        for inner, d, more in (
            ("adamw", 1, {"tau": 1}),
            ("sgd", 3, {"tau": 3, "keep": 0.5, "predict": 0.25, "clip": 0.05}),
            ("adamw", 2, {"tau": 4, "fragments": 3, "clip": 0.02}),
        )
    ),
    *(
        case("SlowMo", inner, tau=tau, outer_momentum=beta, outer_lr=alpha)
        for inner, tau, beta, alpha in (("sgd", 1, 0.5, 1.0), ("adamw", 4, 0.8, 0.6))
    ),
    *(case("LocalSGD", inner, tau=tau) for inner, tau in (("adamw", 3), ("momentum", 1))),
    *(
        case("DiLoCo", inner, tau=3, outer_lr=alpha, outer_momentum=beta)
        for inner, alpha, beta in (("adamw", 0.7, 0.9), ("sgd", 0.5, 0.0))
    ),
    *(
        case("DiLoCo", inner, tau=4, outer_lr=0.7, outer_momentum=0.9, **options)
        for inner, options in (
            ("adamw", {"fragments": 3, "delay": 0, "keep": 0.0}),
            ("sgd", {"fragments": 2, "delay": 1, "keep": 0.5}),
            ("adamw", {"fragments": 1, "delay": 4, "keep": 0.25}),
            ("momentum", {"fragments": 4, "delay": 3, "keep": 1.0}),
        )
    ),
    *(
        case("OverlapLocalSGD", inner, tau=tau, pull=pull, anchor_momentum=b)
        for inner, tau, pull, b in (
            ("sgd", 3, 0.6, 0.7),
            ("adamw", 2, 0.3, 0.0),
            ("sgd", 1, 0.9, 0.5),
        )
    ),
]


def expected_late(given: dict[str, Any], workers: int) -> NDArray[np.float64]:
    """What the equations give where averages are used in the next round."""
    options = given["options"]
    x0, step = reference.steps_of(1, given["inner"], workers)
    run = (x0, step, workers, given["rounds"])
    names = {
        "tau": "tau",
        "delay": "d",
        "keep": "keep",
        "predict": "predict",
        "clip": "phi",
        "fragments": "fragments",
        "preview": "preview",
        "penalty": "penalty",
        "outer_lr": "alpha",
        "outer_momentum": "beta",
    }
    symbols = {names[key]: value for key, value in options.items() if key in names}
    if given["algorithm"] == "DiLoCo":
        return reference.streaming_diloco(*run, **symbols)
    return reference.late_co2(*run, **symbols)


def expected(given: dict[str, Any], workers: int, seen: list[Any]) -> NDArray[np.float64]:
    """What the published equations give for a case."""
    options, dtype = given["options"], getattr(torch, given["model"])
    if "delay" in options:
        return expected_late(given, workers)
    x0, local = reference.steps_of(options["tau"], given["inner"], workers, dtype)
    run = (x0, local, workers, given["rounds"])
    match given["algorithm"]:
        case "CO2":
            return reference.co2(
                *run,
                beta=options["outer_momentum"],
                alpha=options["outer_lr"],
                k=options.get("staleness", 1),
                gap=options.get("gap", "gap_aware"),
                penalty=options.get("penalty", 1.0),
                phi=options.get("clip"),
                seen=seen,
                held=lambda x: torch.from_numpy(x).float().to(dtype).double().numpy(),
            )
        case "SlowMo":
            return reference.slowmo(
                *run,
                beta=options["outer_momentum"],
                alpha=options["outer_lr"],
                rate=RATE[given["inner"]],
            )
        case "LocalSGD":
            return reference.local_sgd(*run)
        case "DiLoCo":
            return reference.diloco(*run, beta=options["outer_momentum"], alpha=options["outer_lr"])
        case _:
            return reference.overlap_local_sgd(
                *run, pull=options["pull"], b=options["anchor_momentum"]
            )


def histories(answers: list[Any], index: int) -> NDArray[np.float64]:
    """Rounds x ranks x elements of one case."""
    return np.array([answer[index]["history"] for answer in answers]).swapaxes(0, 1)


NOT_FINITE = [(float("nan"), "fp32", 1), (float("inf"), "int8", 2), (float("-inf"), "bf16", 0)]


TAU = 3
WIRES: dict[str, Any] = {
    "plain": case("CO2", tau=TAU),
    "bf16": case("CO2", tau=TAU, dtype="bf16"),
    "int8": case("CO2", tau=TAU, dtype="int8"),
    "whole": case("CO2", tau=TAU, bucket_mib=25.0),
    "tiny": case("CO2", model="bfloat16", tau=TAU, outer_lr=0.01, rounds=40),
}
"""What travels: fp32, bf16 and int8, in one bucket, and steps below what the model resolves."""


def three(function: str, **arguments: Any) -> list[Any]:
    """What a function gives on three ranks."""
    return on_ranks(function, 3, module=MODULE, **arguments)


def four(function: str, **arguments: Any) -> list[Any]:
    """What a function gives on two nodes of two ranks."""
    return on_ranks(function, 4, module=MODULE, gpus_per_node=2, **arguments)


def test_equal_runs_give_equal_bits() -> None:
    """Overlapped is serial; CO2 with staleness 0 is SlowMo, which is LocalSGD without momentum."""
    assert three("equal") == [[]] * 3


def test_local_sgd_after_every_step_is_data_parallel_training() -> None:
    """With SGD and tau = 1, the mean of models is a step along the mean gradient."""
    assert max(three("data_parallel")) < 1e-6


def test_low_precision_on_the_wire_and_in_the_model() -> None:
    """Averages in bf16 and int8 are close to fp32's, and cost the bytes that the ring moves.

    A bf16 model follows an fp32 anchor: steps far below its resolution add up.
    """
    n, elements = 3, 80
    answers = three("follow", cases=list(WIRES.values()))
    exact = histories(answers, 0)
    moved = np.abs(exact[-1] - exact[0]).max()
    np.testing.assert_allclose(histories(answers, 3), exact, atol=CLOSE, err_msg="buckets")
    for index, share in ((1, 0.01), (2, 0.02)):
        error = np.abs(histories(answers, index) - exact).max()
        assert 0 < error < share * moved, (index, error, moved)
        assert np.ptp(histories(answers, index), axis=1).max() == 0, "ranks differ"
    buckets = [26, 26, 26, 2]  # 1e-4 MiB of fp32 are 26 elements
    parts = [-(-size // n) for size in buckets]
    sent = [answers[1][index]["sent"] for index in range(4)]
    ring = 2 * (n - 1) * ROUNDS
    assert sum(buckets) == elements
    assert sent == [
        ring * 4 * sum(parts),
        ring * 2 * sum(parts),
        ring * sum(part + 4 + 4 for part in parts),  # a scale, half of what roundings took off
        ring * 4 * -(-elements // n),
    ]
    wanted = expected(WIRES["tiny"], n, [])
    found = histories(answers, 4)
    resolution = 2.0**-8 * np.abs(wanted).max()
    assert np.abs(np.diff(wanted[:, 0], axis=0)).max() < 2 * resolution
    assert np.abs(wanted[-1] - wanted[0]).max() > 5 * resolution
    np.testing.assert_allclose(found, wanted, rtol=2.0**-7, atol=1e-5)


def test_what_quantization_takes_off_is_bounded_on_all_ranks_alike() -> None:
    """The roots of both numbers add up to the error or more, and to about twice as much at most.

    Of independent roundings of n ranks at most sqrt(n + 1), by Cauchy and Schwarz.
    """
    answers = three("rounding")
    assert answers[0] == answers[1] == answers[2]
    for error, sent, mean in answers[0]:
        assert 0 < error <= (sent**0.5 + mean**0.5) ** 2 <= 1.2 * (3 + 1) * error


def test_ranks_that_differ_are_refused_at_the_start() -> None:
    """All ranks are told the first difference."""
    tokens = {
        "frozen": "b.weight",
        "buffer": "extra",
        "order": "strides (27, 1, 9, 3)",
        "shape": "(5, 3)",
        "name": "a.weight",
        "more": "1.weight",
        "dtype": "bfloat16",
        "optimizer": "Adam",
        "tau": "tau = 4",
        "setting": "outer_momentum = 0.1",
    }
    for rank, answer in enumerate(three("refused")):
        ddp = answer.pop("ddp")
        assert ddp.startswith("OptionError")
        assert f"[{rank}]" in ddp
        assert answer.keys() == tokens.keys()
        for name, said in answer.items():
            assert said.startswith("MismatchError: rank 1 ")
            assert tokens[name] in said


def test_weights_loaded_on_one_rank_only_are_refused_at_the_first_step() -> None:
    """Loaded by all, training goes on from them; loaded by one, all ranks are told."""
    for everybody, one in three("loaded"):
        assert everybody == ""
        assert one.startswith("MismatchError: rank 1 ")


def test_an_average_that_is_not_finite_is_not_used() -> None:
    """All ranks are told round and parameter; anchor, momentum and live parameters stay."""
    for answers in three("not_finite", cases=NOT_FINITE):
        for answer, (_, _, staleness) in zip(answers, NOT_FINITE, strict=True):
            assert answer["told"].startswith(
                "NonFiniteError: the average of round 1, used in round"
            )
            assert f"round {1 + staleness}" in answer["told"]
            assert "3.weight" in answer["told"]
            assert "rank 2" in answer["told"]
            assert answer["again"] == answer["told"]
            assert answer["kept"] == [True, True]
            assert answer["live"] == 0
            assert answer["finite"]
            assert answer["rounds"] == 1 + staleness


def test_the_drift_check_names_ranks_whose_anchor_is_another() -> None:
    """One bit in one element is enough."""
    answers = three("drifted")
    assert {answer["plain"] for answer in answers} == {""}
    for answer in answers:
        assert answer["tampered"].startswith("MismatchError: after round 5")
        assert "[2]" in answer["tampered"]


def test_a_block_that_is_closed_within_a_round_lets_go() -> None:
    """An average under way is waited for, and not applied; hooks go."""
    for answer in three("leave"):
        assert answer == {"under way": 1, "applied": False, "let go": [3, 3]}


def test_misuse_is_told_and_not_trained_on() -> None:
    """A closed block, a second algorithm, a late parameter: all ranks are told."""
    for answer in three("misused"):
        assert all(said.startswith("OptionError") for said in answer.values())
        assert "(7, 5)" in answer["unfrozen"]


def test_all_ranks_stop_after_the_step_of_one_that_is_told_to() -> None:
    """`any_rank` is true on all ranks, once it is on one."""
    assert three("stop_together") == [[5, 5]] * 3


def test_ranks_that_keep_vectors_elsewhere_are_refused() -> None:
    """And so are options of NCCL where averages go over Gloo."""
    for told in three("odd_offload"):
        assert "MismatchError: offload" in told
        assert "OptionError: pg_options" in told


@pytest.mark.nightly
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    """Cut between and within rounds, with averages under way; by torch.save and by dcp."""
    assert three("resume", folder=str(tmp_path)) == [[]] * 3


def test_the_chosen_delay_counts_each_average_as_on_its_slowest_rank() -> None:
    """A whole round until five were measured, then 3 for 1, 2 and 3; resuming keeps it."""
    for answer in three("chosen_delay"):
        assert answer == {"delays": [4] * 2 + [3] * 5, "resumed": 3}


def test_the_consensus_is_what_the_training_would_end_with() -> None:
    """After any step: the same on all ranks; with outer momentum and a preview, too."""
    answers = three("agreed")
    for answer in answers:
        assert all(same for *_, same in answer)
    for step in range(18):
        for answer in answers:
            inside, ended, _ = answer[step]
            assert inside == ended == answers[0][step][0]


def test_states_of_other_ranks_and_runs_are_refused() -> None:
    """What may change between runs may; what may not is named."""
    answers = three("wrong_state")
    assert answers[0]["rank"].startswith("OptionError")
    assert "load_anchor()" in answers[0]["rank"]
    for answer in answers:
        assert "'tau = 3', here 'tau = 4'" in answer["tau"]
        assert "(3, 2)" in answer["width"]
        assert answer["same"] == ""


def test_every_algorithm_equals_its_published_equations() -> None:
    """All models after every round, Lambda, clipped share and residual, to float32 rounding."""
    answers = three("follow", cases=CASES)
    for index, given in enumerate(CASES):
        seen: list[Any] = []
        wanted = expected(given, 3, seen)
        found = histories(answers, index)
        assert np.abs(wanted - wanted[0]).max() > 0.01, f"{given} does not move"
        np.testing.assert_allclose(found, wanted, rtol=0, atol=CLOSE, err_msg=str(given))
        told = answers[0][index]
        assert told["counts"] == [ROUNDS, ROUNDS * given["options"]["tau"]]
        if given["algorithm"] == "CO2" and "delay" not in given["options"]:
            k = given["options"].get("staleness", 1)
            lambdas = [1.0] * k + [scale for scale, *_ in seen]
            np.testing.assert_allclose(told["penalties"], lambdas, rtol=1e-4, err_msg=str(given))
            share = sum(clipped for _, clipped, _ in seen) / (len(seen) * found.shape[-1])
            removed = sum(squares for *_, squares in seen)
            assert told["residual"] == pytest.approx(removed, rel=1e-3), given
            assert told["clipped"] == pytest.approx(share), given
            if "clip" in given["options"]:
                assert 0.01 < share < 0.9, f"{given} clips {share}"


def test_an_evaluation_of_the_consensus_leaves_nothing_gathered() -> None:
    """FSDP2 that keeps whole parameters after a forward must not go on with the wrong ones."""
    for live, consensus, again, anew in four("evaluated_inside"):
        assert live == again == anew
        assert consensus != live


def test_nodes_fail_and_resume_as_one(tmp_path: Path) -> None:
    """A NaN or a drift in one rank's share is an error on all; dcp keeps every rank's state."""
    answers = four("wrong_inside", folder=str(tmp_path))
    for rank, answer in enumerate(answers):
        for inside in ("ddp", "fsdp"):
            assert answer[f"{inside} nan"].startswith("NonFiniteError: the average of round 1")
            assert ("0.weight" in answer[f"{inside} nan"]) == (rank in {0, 2})
            assert "rank 2" in answer[f"{inside} nan"], answer
            assert answer[f"{inside} drift"].startswith("MismatchError: after round 1"), answer
            assert answer[f"{inside} loaded"] == [True, True, 5]
        mine = [0, 1] if rank < 2 else [2, 3]
        assert answer["bare"].startswith("MismatchError: after round 0")
        assert f"{mine}" in answer["bare"]
        assert answer["groups"] == 0, "groups made for worker='node' are given back"
        assert "over ranks [0, 1, 2, 3]" in answer["over all"]
        assert f"worker is ranks {mine}" in answer["over all"]
        assert f"worker is ranks [{rank}]" in answer["per gpu"]
