"""The local-update family on several ranks, against plain transcriptions and against itself."""

import itertools
import re
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference_local_update as reference  # noqa: E402 - needs torch
from algorithm_workers import DEADLINE  # noqa: E402 - needs torch
from local_problem import RATE  # noqa: E402 - needs torch
from numpy.typing import NDArray  # noqa: E402
from ranks import on_ranks  # noqa: E402
from together import together  # noqa: E402

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
            ("adamw", 2, {"tau": 4, "fragments": 3, "penalty": 1.5}),
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


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What three ranks gave, by function."""
    calls: dict[str, dict[str, Any]] = {
        "averages": {},
        "equal": {},
        "data_parallel": {},
        "follow": {"cases": list(WIRES.values())},
        "refused": {},
        "alike_at_start": {},
        "loaded": {},
        "not_finite": {"cases": NOT_FINITE},
        "drifted": {},
        "leave": {},
        "misused": {},
        "consensus": {},
        "resume": {"folder": str(tmp_path_factory.mktemp("states"))},
        "wrong_state": {},
        "chosen_delay": {},
        "slower_than_its_delay": {},
        "agreed": {},
        "late": {"dtypes": ["fp32", "int8"]},
    }
    return together(MODULE, 3, calls)


def test_equal_runs_give_equal_bits(three_ranks: dict[str, list[Any]]) -> None:
    """Overlapped is serial; CO2 with staleness 0 is SlowMo, which is LocalSGD without momentum."""
    assert three_ranks["equal"] == [[]] * 3


def test_local_sgd_after_every_step_is_data_parallel_training(
    three_ranks: dict[str, list[Any]],
) -> None:
    """With SGD and tau = 1, the mean of models is a step along the mean gradient."""
    assert max(three_ranks["data_parallel"]) < 1e-6


def test_low_precision_on_the_wire_and_in_the_model(three_ranks: dict[str, list[Any]]) -> None:
    """Averages in bf16 and int8 are close to fp32's, and cost the bytes that the ring moves.

    A bf16 model follows an fp32 anchor: steps far below its resolution add up.
    """
    n, elements = 3, 80
    answers = three_ranks["follow"]
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
        ring * sum(part + 4 for part in parts),
        ring * 4 * -(-elements // n),
    ]
    wanted = expected(WIRES["tiny"], n, [])
    found = histories(answers, 4)
    resolution = 2.0**-8 * np.abs(wanted).max()
    assert np.abs(np.diff(wanted[:, 0], axis=0)).max() < 2 * resolution
    assert np.abs(wanted[-1] - wanted[0]).max() > 5 * resolution
    np.testing.assert_allclose(found, wanted, rtol=2.0**-7, atol=1e-5)


def test_an_average_is_a_mean_in_every_bucket(three_ranks: dict[str, list[Any]]) -> None:
    """A million elements in four buckets: 1, 2 and 3 become 2."""
    for answer in three_ranks["averages"]:
        for error, waited in answer:
            assert error < 1e-6
            assert 0 < waited < 10


def test_ranks_that_differ_are_refused_at_the_start(three_ranks: dict[str, list[Any]]) -> None:
    """All ranks are told the first difference."""
    answers = three_ranks["refused"]
    for rank, answer in enumerate(answers):
        answer["ddp"] = answer["ddp"].replace(f"ranks [{rank}]", "ranks [RANK]")
    assert answers[0] == answers[1] == answers[2]
    words = "MismatchError: rank 1 has another model, optimizer or setting than rank 0: "
    assert answers[0] == {
        "frozen": words + "'not averaged: b.weight: (4, 2) float32, strides (2, 1)' instead of 'not"
        " averaged: b.weight: (3, 2) float32, strides (2, 1)'",
        "buffer": words + "'not averaged: extra: (2,) float32, strides (1,)' instead of 'optimizer"
        " = SGD'",
        "order": words + "'weight: (4, 3, 3, 3) float32, strides (27, 1, 9, 3)' instead of 'weight:"
        " (4, 3, 3, 3) float32, strides (27, 9, 3, 1)'",
        "shape": words + "'weight: (4, 3) float32, strides (3, 1)' instead of 'weight: (5, 3)"
        " float32, strides (3, 1)'",
        "name": words + "'b.weight: (2, 2) float32, strides (2, 1)' instead of 'a.weight: (2, 2)"
        " float32, strides (2, 1)'",
        "more": words + "'1.weight: (2, 2) float32, strides (2, 1)' instead of 'optimizer = SGD'",
        "dtype": words + "'weight: (2, 2) bfloat16, strides (2, 1)' instead of 'weight: (2, 2)"
        " float32, strides (2, 1)'",
        "optimizer": words + "'optimizer = Adam' instead of 'optimizer = SGD'",
        "tau": words + "'tau = 3' instead of 'tau = 4'",
        "setting": words + "'outer_momentum = 0.1' instead of 'outer_momentum = 0.2'",
        "ddp": (
            "OptionError: the model is DDP over ranks [0, 1, 2], but a worker is ranks [RANK]: pass"
            " the bare module, or make it DDP over the worker's ranks (worker='node',"
            " process_group=Workers.per_node().inner)"
        ),
    }


def test_all_start_alike_and_only_trainable_parameters_are_averaged(
    three_ranks: dict[str, list[Any]],
) -> None:
    """Frozen parameters and buffers are sent once, from the first worker."""
    answers = three_ranks["alike_at_start"]
    assert [answer[0] for answer in answers] == [[4.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0]] * 3
    assert [answer[1] for answer in answers] == [[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]


def test_weights_loaded_on_one_rank_only_are_refused_at_the_first_step(
    three_ranks: dict[str, list[Any]],
) -> None:
    """Loaded by all, training goes on from them; loaded by one, all ranks are told."""
    for everybody, one in three_ranks["loaded"]:
        assert everybody == "no error"
        assert one.startswith("MismatchError: rank 1 has another start of training than rank 0: ")
        assert "'parameters loaded since, with hash " in one
        assert "instead of 'parameters as they were sent to all'" in one


@pytest.mark.parametrize("index", range(len(NOT_FINITE)))
def test_an_average_that_is_not_finite_is_not_used(
    index: int, three_ranks: dict[str, list[Any]]
) -> None:
    """All ranks are told round and parameter; anchor, momentum and live parameters stay."""
    staleness = NOT_FINITE[index][2]
    for answers in three_ranks["not_finite"]:
        answer = answers[index]
        assert answer["told"].startswith(
            f"NonFiniteError: the average of round 1, used in round {1 + staleness}, has "
        ), answer
        assert "first in '3.weight'; from rank 2; " in answer["told"]
        assert answer["again"] == answer["told"]
        assert answer["kept"] == [True, True]
        assert answer["live"] == 0
        assert answer["finite"]
        assert answer["rounds"] == 1 + staleness


def test_the_drift_check_names_ranks_whose_anchor_is_another(
    three_ranks: dict[str, list[Any]],
) -> None:
    """One bit in one element is enough."""
    answers = three_ranks["drifted"]
    assert {answer["plain"] for answer in answers} == {"no error"}
    assert {answer["tampered"] for answer in answers} == {
        "MismatchError: after round 5 the anchor of ranks [2] is not that of the others"
    }


def test_blocks_end_in_good_order(three_ranks: dict[str, list[Any]]) -> None:
    """An exception waits for nobody, and is told; else averages are waited for; hooks go."""
    answers = three_ranks["leave"]
    assert answers[0]["told"] == "mine"
    for rank in (1, 2):
        at, told = answers[rank]["told"].split(" failed: ")
        assert at in {"closing", "training"}  # on a slow machine within the step, too
        assert told == f"rank 0 raised KeyError ('mine') after 1 steps; rank {rank} has taken 1"
    assert all(answer["seconds"] < 20 for answer in answers)  # of a deadline of 60
    for answer in answers:
        assert answer["under way"] == 1
        assert answer["not applied"]
        assert answer["let go"] == [3, 3]


def test_misuse_is_told_and_not_trained_on(three_ranks: dict[str, list[Any]]) -> None:
    """A closed block, a second algorithm, a late parameter: all ranks are told."""
    for answer in three_ranks["misused"]:
        assert answer == {
            "shared": (
                "OptionError: the optimizer already closes rounds for another algorithm; close that"
                " one first"
            ),
            "again": "OptionError: this CO2 is closed and averages nothing; make a new one",
            "unfrozen": (
                "OptionError: the optimizer trains a parameter of shape (7, 5) that was frozen, or"
                " not there, when averaging began: train it from the start (at a rate of 0), or end"
                " before with finish() and make a new CO2; in Lightning and Transformers, with a"
                " second fit() or train()"
            ),
        }


def test_consensus_shows_the_anchor_and_gives_the_model_back(
    three_ranks: dict[str, list[Any]],
) -> None:
    """In the middle of a round workers differ; within, they do not."""
    inside, restored, live = zip(*three_ranks["consensus"], strict=True)
    assert inside[0] == inside[1] == inside[2]
    assert restored == (True, True, True)
    assert live[0] != live[1]
    assert inside[0] not in live


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    three_ranks: dict[str, list[Any]],
) -> None:
    """Cut between and within rounds, with averages under way; by torch.save and by dcp."""
    assert three_ranks["resume"] == [[]] * 3


def test_the_chosen_delay_counts_each_average_as_on_its_slowest_rank(
    three_ranks: dict[str, list[Any]],
) -> None:
    """A whole round until three were measured, then 3 for 1, 2 and 3; resuming keeps it."""
    for answer in three_ranks["chosen_delay"]:
        assert answer == {"delays": [4] + [3] * 6, "resumed": 3}


def test_an_average_that_takes_longer_than_its_delay_is_waited_for(
    three_ranks: dict[str, list[Any]],
) -> None:
    """It says so, and all workers go on from what the equations give."""
    answers = three_ranks["slower_than_its_delay"]
    for answer in answers[:2]:
        assert answer["late"] >= 2
        assert answer["waited"] > 0.3
    x0, step = reference.steps_of(1, "sgd", 3)
    wanted = reference.late_co2(x0, step, 3, 4, tau=2, d=1)[-1]
    np.testing.assert_allclose([answer["ended"] for answer in answers], wanted, atol=CLOSE)


def test_the_consensus_counts_averages_under_way(three_ranks: dict[str, list[Any]]) -> None:
    """At the end of a round it is the mean of all workers; it does not change within a round."""
    answers = three_ranks["agreed"]
    for answer in answers:
        assert all(same for _, _, same in answer)
    for step in range(9):
        inside = [answer[step][0] for answer in answers]
        assert inside[0] == inside[1] == inside[2]
        if step >= 2:
            ends = [answer[step - (step + 1) % 3][1] for answer in answers]
            np.testing.assert_allclose(inside[0], np.mean(ends, axis=0), atol=1e-6)


def test_states_of_other_ranks_and_runs_are_refused(three_ranks: dict[str, list[Any]]) -> None:
    """What may change between runs may; what may not is named."""
    answers = three_ranks["wrong_state"]
    assert answers[0]["rank"] == (
        "OptionError: the saved state holds rank1, not rank0: load it on as many ranks as saved it,"
        " or take load_anchor()"
    )
    for answer in answers:
        assert answer["tau"] == (
            "OptionError: the saved state is of another run: 'tau = 3', here 'tau = 4'"
        )
        saved, here = ("'weight: (2, 2) float32, strides (2, 1)'", "'weight: (3, 2) float32")
        assert f"{saved}, here {here}" in answer["width"]
        assert answer["same"] == "no error"


TOLD = r"RankFailure: the average of round [12] failed: a rank died, took fewer steps, or"


def test_a_killed_worker_is_told_at_once() -> None:
    """The others are told what they were doing, long before the deadline of a minute."""
    answers = on_ranks("killed", 3, module=MODULE, dies=1)
    for answer in (answers[0], answers[2]):
        assert re.match(TOLD, answer["told"])
        assert answer["seconds"] < 20


def test_a_late_worker_is_told_after_the_deadline(three_ranks: dict[str, list[Any]]) -> None:
    """By torch's own collectives and by the thread of int8; and all can begin anew after that."""
    for found in (three_ranks["late"][0], three_ranks["late"][2]):
        for answer in found:
            assert re.match(TOLD, answer["told"])
            assert 0.9 * DEADLINE < answer["seconds"] < DEADLINE + 15


_STREAMED = {"tau": 4, "keep": 0.5, "outer_lr": 0.7, "outer_momentum": 0.9}

INSIDE = [
    {**case(*named, **options), "inside": inside, "explicit": inside == "fsdp"}
    for inside, (named, options) in itertools.product(
        ("ddp", "fsdp"),
        (
            (("CO2", "sgd"), {"tau": 3, "clip": 0.03}),
            (("CO2", "adamw"), {"tau": 2, "staleness": 2}),
            (("DiLoCo", "adamw"), {"tau": 2, "outer_lr": 0.7, "outer_momentum": 0.9}),
            (("LocalSGD", "momentum"), {"tau": 1}),
            (("OverlapLocalSGD", "sgd"), {"tau": 2, "pull": 0.6, "anchor_momentum": 0.7}),
            (("CO2", "sgd"), {"tau": 3, "dtype": "int8"}),
            (("CO2", "adamw"), {"tau": 3, "delay": 2, "keep": 0.5, "predict": 0.5}),
            (("DiLoCo", "sgd"), {**_STREAMED, "fragments": 1, "delay": 2}),
        ),
    )
]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two nodes of two ranks gave, by function; "follow" takes every rank as a worker."""
    calls: dict[str, dict[str, Any]] = {
        "follow": {"cases": CASES},
        "inside_nodes": {"cases": INSIDE},
        "evaluated_inside": {},
        "wrong_inside": {"folder": str(tmp_path_factory.mktemp("nodes"))},
    }
    return together(MODULE, 4, calls, gpus_per_node=2)


def test_every_algorithm_equals_its_published_equations(
    two_nodes: dict[str, list[Any]],
) -> None:
    """All models after every round, Lambda and clipped share, to float32 rounding."""
    answers = two_nodes["follow"]
    for index, given in enumerate(CASES):
        seen: list[Any] = []
        wanted = expected(given, 4, seen)
        found = histories(answers, index)
        assert np.abs(wanted - wanted[0]).max() > 0.01, f"{given} does not move"
        np.testing.assert_allclose(found, wanted, rtol=0, atol=CLOSE, err_msg=str(given))
        told = answers[0][index]
        assert told["counts"] == [ROUNDS, ROUNDS * given["options"]["tau"]]
        if given["algorithm"] == "CO2" and "delay" not in given["options"]:
            k = given["options"].get("staleness", 1)
            lambdas = [1.0] * k + [scale for scale, _ in seen]
            np.testing.assert_allclose(told["penalties"], lambdas, rtol=1e-4, err_msg=str(given))
            share = sum(clipped for _, clipped in seen) / (len(seen) * found.shape[-1])
            assert told["clipped"] == pytest.approx(share), given
            if "clip" in given["options"]:
                assert 0.01 < share < 0.9, f"{given} clips {share}"


def test_an_evaluation_of_the_consensus_leaves_nothing_gathered(
    two_nodes: dict[str, list[Any]],
) -> None:
    """FSDP2 that keeps whole parameters after a forward must not go on with the wrong ones."""
    for live, consensus, again, anew in two_nodes["evaluated_inside"]:
        assert live == again == anew
        assert consensus != live


def test_nodes_as_workers_equal_the_reference_of_two_workers(
    two_nodes: dict[str, list[Any]],
) -> None:
    """Two nodes of two ranks, DDP or FSDP2 inside; each rank keeps and averages its share."""
    answers = two_nodes["inside_nodes"]
    for index, given in enumerate(INSIDE):
        seen: list[Any] = []
        wanted = expected(given, 2, seen)[:, [0, 0, 1, 1]]
        found = histories(answers, index)
        low = given["options"].get("dtype") == "int8"
        np.testing.assert_allclose(
            found, wanted, rtol=0, atol=5e-3 if low else 5e-6, err_msg=str(given)
        )
        told = [answer[index] for answer in answers]
        if given["algorithm"] != "OverlapLocalSGD" and "delay" not in given["options"]:
            assert all(one["anchor"] == one["history"][-1] for one in told)
        assert told[0]["kept"] + told[1]["kept"] == 80, "shares of a worker are the whole model"
        assert {one["kept"] for one in told} == ({40} if given["inside"] == "ddp" else {48, 32})
        if seen and not low:
            share = sum(clipped for _, clipped in seen) / (len(seen) * 80)
            assert (share > 0.01) == ("clip" in given["options"]), f"{given} clips {share}"
            assert [one["penalty"] for one in told] == pytest.approx([seen[-1][0]] * 4, rel=1e-4)
            assert [one["clipped"] for one in told] == pytest.approx([share] * 4)


def test_nodes_fail_and_resume_as_one(two_nodes: dict[str, list[Any]]) -> None:
    """A NaN or a drift in one rank's share is an error on all; dcp keeps every rank's state."""
    answers = two_nodes["wrong_inside"]
    for rank, answer in enumerate(answers):
        for inside in ("ddp", "fsdp"):
            assert answer[f"{inside} nan"].startswith(
                "NonFiniteError: the average of round 1, used in round 2, has 1 elements"
            ), answer
            assert ("0.weight" in answer[f"{inside} nan"]) == (rank in {0, 2})
            assert "; from rank 2; " in answer[f"{inside} nan"], answer
            assert answer[f"{inside} drift"].startswith("MismatchError: after round 1"), answer
            assert answer[f"{inside} loaded"] == [True, True, 5]
        mine = [0, 1] if rank < 2 else [2, 3]
        assert answer["bare"] == (
            f"MismatchError: after round 0 the ranks of a worker, {mine}, hold different"
            " parameters: wrap the model in DDP or FSDP2 over Workers.per_node().inner, or take"
            " worker='gpu'"
        )
        assert answer["groups"] == 0, "groups made for worker='node' are given back"
        assert "over ranks [0, 1, 2, 3]" in answer["over all"]
        assert f"worker is ranks {mine}" in answer["over all"]
        assert f"worker is ranks [{rank}]" in answer["per gpu"]
