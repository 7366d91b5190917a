"""Published congested collectives: descriptions fit the data, predictions follow by hand."""

import pytest

from analysis.published import fabric


@pytest.fixture(scope="module")
def rows() -> dict[int, fabric.Compared]:
    """All rows that are described, by their number."""
    return {row.row: row for row in fabric.compared(draws=1)}


def test_two_flows_that_meet_share_an_uplink(rows: dict[int, fabric.Compared]) -> None:
    """MCCS, 8 GPUs: 10.3 GB/s in one draw of four, else 6.25 GB/s of an uplink."""
    assert 1 / rows[3].predicted == pytest.approx(0.25 + 0.75 * 10.3 / 6.25, rel=0.01)


def test_measured_speeds_are_of_the_mean_time(rows: dict[int, fabric.Compared]) -> None:
    """15 runs of 6.06 GB/s and 5 of 10.3."""
    assert rows[3].measured == pytest.approx(20 / (15 / 6.06 + 5 / 10.3) / 10.3, rel=1e-3)


def test_sources_have_a_line_each_and_all_have_one(rows: dict[int, fabric.Compared]) -> None:
    """The last line is of all rows."""
    lines = fabric.summary(list(rows.values()))
    assert len(lines) == 1 + len({row.source for row in rows.values()})
    assert f"{len(rows)} rows" in lines[-1]


def test_what_is_not_said_is_named(rows: dict[int, fabric.Compared]) -> None:
    """Every description assumes something."""
    assert all(row.assumed for row in rows.values())
