"""A training goes on when workers die: it learns what the equations say for those who are left."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from elastic_ranks import (  # noqa: E402
    LR,
    MOMENTUM,
    RANKS,
    ROUNDS,
    SETTINGS,
    TAU,
    Faults,
    Outcome,
    elastic,
)

from realrun.train.elastic_record import GenerationRow, summary  # noqa: E402
from realrun.train.log import read  # noqa: E402

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch, importing
]


def reference(strategy: str, present: list[list[int]], peer: Mapping[int, int]) -> Any:
    """See elastic_reference, whose imports warn."""
    import elastic_reference  # noqa: PLC0415

    return elastic_reference.reference(strategy, present, peer)


def learned(folder: Path) -> Any:
    """The parameters that were written."""
    return torch.cat([one.flatten() for one in torch.load(folder / "model.pt").values()])


def rounds_of(outcome: Outcome, lost: int) -> list[list[int]]:
    """Who takes part in the average of each round: rank `lost` is away from one to another."""
    away = next(row for row in outcome.rows if row.lost)
    back = next((row.round for row in outcome.rows[1:] if row.joined), ROUNDS)
    everybody = list(range(RANKS))
    left = [rank for rank in everybody if rank != lost]
    # The row of CO2 is of the round in which an average was missed: that of the round before.
    missed = away.round
    return [left if missed <= number <= back else everybody for number in range(ROUNDS)]


def train(folder: Path, strategy: str, faults: Faults, restarts: int = 1, **other: Any) -> Outcome:
    """The small training, which must end well."""
    settings = {"strategy": strategy, **SETTINGS, **other}
    outcome = elastic(folder, RANKS, settings, faults, restarts)
    assert outcome.code == 0, outcome.said
    return outcome


@pytest.mark.parametrize("lost", [0, 1])
def test_the_average_is_over_those_who_are_left(lost: int, tmp_path: Path) -> None:
    """A worker of DiLoCo dies for good: from that round on two ranks are averaged.

    Rank 0, which leads and writes, may be the one; all rows are there all the same.
    """
    outcome = train(tmp_path, "diloco:tau=2", Faults({f"{lost}.0": 8}), restarts=0)
    assert [row.lost for row in outcome.rows] == ["", f"{lost}.0"]
    assert outcome.rows[1].round == 3  # step 8 is the last of it
    assert outcome.facts["losses"] == 1
    assert outcome.facts["rejoins"] == 0
    assert outcome.facts["rounds_by_members"] == {"3": 3, "2": 9}
    assert outcome.facts["anchors_equal"]
    expected = reference("diloco:tau=2", rounds_of(outcome, lost), {})
    torch.testing.assert_close(learned(tmp_path), expected, rtol=1e-4, atol=1e-5)
    everybody = reference("diloco:tau=2", [[0, 1, 2]] * ROUNDS, {})
    assert (everybody - expected).abs().max() > 1e-3  # it can fail
    assert [row.step for row in read(tmp_path)] == list(range(1, TAU * ROUNDS + 1))
    assert outcome.writer == ("1.0" if lost == 0 else "0.0")


@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_worker_comes_back_at_the_end_of_a_round(lost: int, tmp_path: Path) -> None:
    """With the anchor of the others, bit for bit, the optimizer's state of one, and its own data.

    The others hold at step 13 until it waits; where they are slow it is back before.
    """
    outcome = train(tmp_path, "diloco:tau=2", Faults({f"{lost}.0": 5}, holds=13))
    _, away, back = outcome.rows
    assert (away.round, away.lost) == (2, f"{lost}.0")
    assert 2 < back.round <= 6
    assert back.joined == f"{lost}.1"
    assert (back.same, back.standing) == (3, 3)
    assert outcome.facts["anchors_equal"]
    lead = int(back.members[0])
    expected = reference("diloco:tau=2", rounds_of(outcome, lost), {lost: lead})
    torch.testing.assert_close(learned(tmp_path), expected, rtol=1e-4, atol=1e-5)


def test_co2_makes_the_average_that_was_under_way_again(tmp_path: Path) -> None:
    """The survivors' displacements of it are not lost; whether the dead one's counts is open.

    It died in round 3: what it launched at the end of round 2 may have arrived before, or not.
    """
    outcome = train(
        tmp_path,
        "co2:tau=2",
        Faults({"1.0": 8}, holds=17),
        outer={"momentum": str(MOMENTUM), "lr": str(LR), "gap": "constant"},
    )
    _, away, back = outcome.rows
    assert away.lost == "1.0"
    assert away.round in {3, 4}  # who waits for it sees it
    assert (back.joined, back.same, back.standing) == ("1.1", 3, 3)
    found = learned(tmp_path)
    lead = int(back.members[0])
    errors = []
    for last in (2, 1):  # the last round of the dead one that counts
        present = [[0, 2] if last < number <= back.round else [0, 1, 2] for number in range(ROUNDS)]
        expected = reference("co2:tau=2", present, {1: lead})
        errors.append(float((found - expected).abs().max()))
    assert min(errors) < 1e-5, errors
    assert max(errors) > 1e-3, errors


@pytest.mark.parametrize(
    "strategy",
    ["co2:tau=2,delay=1", "co2:tau=4,delay=3,fragments=4", "diloco:tau=4,fragments=2,delay=3"],
)
def test_averages_that_are_used_late_survive_too(strategy: str, tmp_path: Path) -> None:
    """Two die, one of them as the lead; both come back, and all hold one anchor in the end."""
    outcome = train(
        tmp_path,
        strategy,
        Faults({"0.0": 6, "2.0": 11}, holds=15),
        restarts=2,
        steps=48,
        optimizer="adamw",
        lr=1e-3,
        outer={},
    )
    assert outcome.facts["losses"] == 2
    assert outcome.facts["anchors_equal"]
    assert {row.lost for row in outcome.rows if row.lost} in ({"0.0", "2.0"}, {"0.0 2.0"})
    assert all(row.same == row.standing for row in outcome.rows)
    losses = [row.validation_loss for row in read(tmp_path) if row.validation_loss]
    assert losses[-1] < losses[0]


def test_a_worker_that_hangs_is_left_out_and_killed(tmp_path: Path) -> None:
    """After the deadline, twice: for the average, and for it to come to the others."""
    faults = Faults({"1.0": 5}, frozen=True, deadline=4.0)
    outcome = train(tmp_path, "diloco:tau=2", faults, restarts=0)
    assert [row.lost for row in outcome.rows] == ["", "1.0"]
    assert 1 <= outcome.rows[1].stood_still < 30  # it is waited for 4 s, less what it took to see
    assert outcome.facts["rounds_by_members"] == {"3": 2, "2": 10}


def test_one_that_hangs_while_it_writes_the_results_is_killed_and_another_writes(
    tmp_path: Path,
) -> None:
    """The others waited a minute for it, failed, and were started anew to wait without end."""
    faults = Faults({}, hangs=("0.0", ""), deadline=2.0)
    outcome = train(tmp_path, "diloco:tau=2", faults, restarts=0)
    assert outcome.writer in {"1.0", "2.0"}  # the second, where the first is too slow, too
    assert outcome.facts["rounds_by_members"] == {"3": ROUNDS}


def test_one_that_hangs_once_the_results_are_written_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training has ended well, and the launcher ends, too."""
    monkeypatch.setattr("realrun.launch.elastic.SILENT", 2.0)
    outcome = train(tmp_path, "diloco:tau=2", Faults({}, hangs=("", "2.0")), restarts=0)
    assert outcome.writer == "0.0"


def test_when_none_is_left_that_holds_the_model_all_end(tmp_path: Path) -> None:
    """Also those who were started anew, and wait in vain."""
    settings = {"strategy": "diloco:tau=2", **SETTINGS}
    faults = Faults({"0.0": 5, "1.0": 5, "2.0": 5})
    outcome = elastic(tmp_path, RANKS, settings, faults, 10)
    assert outcome.code == 1
    assert outcome.record == {}


def test_the_summary_adds_up() -> None:
    """Rounds by members are all rounds; what a member lost and joined is counted once."""

    def row(generation: int, number: int, members: str, lost: str, joined: str) -> GenerationRow:
        return GenerationRow(
            generation=generation,
            step=2 * number,
            round=number,
            members=members,
            lost=lost,
            joined=joined,
            noticed=10.0,
            went_on=10.5,
            same=2,
            standing=2,
            anchor="",
        )

    rows = [
        row(0, 0, "0.0 1.0 2.0", "", "0.0 1.0 2.0"),
        row(1, 4, "1.0", "0.0 2.0", ""),
        row(2, 7, "1.0 0.1", "", "0.1"),
    ]
    found = summary(rows, 10)
    assert found["rounds_by_members"] == {"3": 4, "1": 3, "2": 3}
    assert (found["losses"], found["rejoins"], found["seconds_stood_still"]) == (2, 1, 1.0)
    assert found["anchors_equal"]
