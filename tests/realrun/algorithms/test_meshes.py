"""Workers that are parts of a DeviceMesh: FSDP2, tensor parallelism and HSDP inside a worker."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import reference_local_update as reference  # noqa: E402 - needs torch
from ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.dist

MODULE = "mesh_workers"
TAU, ROUNDS = 2, 5
CLOSE = 2e-6
"""What float32 may be off after 5 rounds in which elements move by 0.1 to 1."""


def case(algorithm: str, inner: str, **options: Any) -> dict[str, Any]:
    """A case for ranks and reference."""
    return {
        "algorithm": algorithm,
        "inner": inner,
        "rounds": ROUNDS,
        "options": {"tau": TAU, "bucket_mib": 1e-4, **options},
    }


CASES = [
    case("LocalSGD", "adamw"),
    case("CO2", "adamw", outer_momentum=0.5, outer_lr=0.7, clip=0.02, gap="gap_aware"),
    case("DiLoCo", "sgd", outer_momentum=0.9, outer_lr=0.5),
    case("CO2", "momentum", delay=1, keep=0.5, predict=0.5),
]


@pytest.mark.parametrize(
    ("inside", "ranks", "cases"),
    [
        ("tp", 4, CASES),  # 2 workers x 1 FSDP2 rank x 2 tensor parallel ranks
        ("tp alone", 4, CASES[1:2]),  # plain and replicated parameters count once in norms
        ("fsdp, tp", 8, CASES),  # 2 workers x 2 FSDP2 x 2 tensor parallel ranks, uneven shards
        ("hsdp", 8, CASES[1::2]),  # 2 workers x 2 replicas x 2 shards, replicas made alike
    ],
    ids=["tp", "tp alone", "fsdp, tp", "hsdp"],
)
def test_workers_on_a_mesh_equal_one_process(
    inside: str, ranks: int, cases: list[dict[str, Any]]
) -> None:
    """Models of both workers, penalties, clipped shares and residuals."""
    answers = on_ranks("follow", ranks, module=MODULE, inside=inside, cases=cases)
    for index, given in enumerate(cases):
        seen: list[Any] = []
        options = given["options"]
        x0, local = reference.steps_of(1 if "delay" in options else TAU, given["inner"], 2)
        run = (x0, local, 2, ROUNDS)
        if given["algorithm"] == "LocalSGD":
            wanted = reference.local_sgd(*run)
        elif given["algorithm"] == "DiLoCo":
            wanted = reference.diloco(*run, beta=0.9, alpha=0.5)
        elif "delay" in options:
            wanted = reference.late_co2(*run, tau=TAU, d=1, keep=0.5, predict=0.5)
        else:
            wanted = reference.co2(*run, beta=0.5, alpha=0.7, gap="gap_aware", phi=0.02, seen=seen)
        assert np.abs(wanted - wanted[0]).max() > 0.01, f"{given} does not move"
        for rank, answer in enumerate(answers):
            found = np.array(answer[index]["history"])
            worker = 2 * rank // ranks
            np.testing.assert_allclose(
                found, wanted[:, worker], rtol=0, atol=CLOSE, err_msg=f"{inside} {rank} {given}"
            )
            if seen:
                lambdas = [1.0, *(scale for scale, *_ in seen)]
                np.testing.assert_allclose(answer[index]["penalties"], lambdas, rtol=1e-4)
                share = sum(clipped for _, clipped, _ in seen) / (len(seen) * len(x0))
                assert answer[index]["clipped"] == pytest.approx(share)
                assert 0.01 < share < 0.9
                removed = sum(squares for *_, squares in seen)
                assert answer[index]["residual"] == pytest.approx(removed, rel=1e-3)


@pytest.mark.nightly
def test_a_worker_on_a_mesh_resumes_bit_for_bit() -> None:
    """Within a round and between two, with fragments under way and replicas on submeshes."""
    given = case("CO2", "adamw", delay=1, fragments=2, outer_momentum=0.5, clip=0.02)
    for found in on_ranks("resumed", 8, module=MODULE, inside="fsdp, tp", case=given, cuts=[3, 4]):
        assert found == [[True, True]] * 2


def test_consensus_and_end_are_one_whole_model_on_a_mesh() -> None:
    """And buffers are their mean; what a worker holds comes back after the consensus."""
    given = case("CO2", "sgd", outer_momentum=0.5)
    answers = on_ranks("ended", 4, module=MODULE, inside="tp", case=given)
    for answer in answers:
        assert answer["before"] == answer["after"]
        assert answer["before"] != answer["consensus"] == answers[0]["consensus"]
        assert answer["seen"] == [1.5]
        assert answer["end"] == answers[0]["end"]
        assert answer["end"][-1] == 1.5
    assert answers[0]["before"] == answers[1]["before"] != answers[2]["before"]


def test_replicas_that_differ_are_named() -> None:
    """Only ranks that hold the same part: with HSDP, and of a parameter that is not sharded."""
    for rank, (hsdp, tp) in enumerate(on_ranks("tampered", 4, module=MODULE)):
        assert hsdp.startswith("MismatchError: after round 0 ranks [1, 3] of a worker hold"), hsdp
        assert tp.startswith("MismatchError" if rank > 1 else "RankFailure"), tp
        assert "after round 0 ranks [2, 3] of a worker hold" in tp


def test_meshes_that_workers_cannot_average_over_are_refused() -> None:
    """With what was given and what is allowed."""
    for told in on_ranks("refused", 4, module=MODULE, last=True):
        assert told["turned"].startswith("MismatchError: rank")
        assert "'part of 0.weight: Shard(dim=0) 1 of 2'" in told["turned"]
        assert "spread over ranks [0, 1, 2, 3]" in told["wide"]
        assert (
            "'sum' is placed as (Partial(sum),); each placement must be a shard" in told["partial"]
        )
        assert "across is 'replicate'; it must name" in told["unknown"]
        assert told["unknown"].endswith("each once: dp, shard")
        assert "across is ()" in told["none"]
        assert "has no names (mesh_dim_names)" in told["nameless"]
        assert "of 4; give the mesh of all ranks" in told["part"]


def test_dimensions_of_a_mesh_tell_workers_apart() -> None:
    """One dimension, two in any order, and all; the others are a worker."""
    across = [["a"], ["c", "a"], ["a", "b", "c"]]
    for rank, found in enumerate(on_ranks("groups", 8, module=MODULE, across=across)):
        a, b, c = rank // 4, rank // 2 % 2, rank % 2
        assert found[0] == [[rank % 4, rank % 4 + 4], [4 * a + other for other in range(4)]]
        peers = [2 * b, 2 * b + 1, 2 * b + 4, 2 * b + 5]
        assert found[1] == [peers, [4 * a + c, 4 * a + c + 2]]
        assert found[2] == [list(range(8)), [rank]]
