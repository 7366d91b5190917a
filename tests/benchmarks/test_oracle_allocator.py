"""The rules of PyTorch's caching allocator, by what its source says of them."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from oracle_allocator import MIB, Event, reserved


@pytest.mark.parametrize(
    ("size", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB, 12)],
)
def test_a_segment_is_as_large_as_the_source_says(size: int, segment: int) -> None:
    """2 MiB for small blocks, 20 for those below 10, and a multiple of 2 for larger ones."""
    assert reserved([("take", 0, size)]) == segment * MIB


def test_a_free_block_is_used_again_and_split() -> None:
    """One of 100 MiB holds 60 and 40 afterwards."""
    events: list[Event] = [("take", 0, 100 * MIB), ("give", 0, 0)]
    events += [("take", 1, 60 * MIB), ("take", 2, 40 * MIB)]
    assert reserved(events) == 100 * MIB


def test_blocks_of_two_segments_do_not_join() -> None:
    """Two of 50 MiB hold no 100: a third segment."""
    events: list[Event] = [("take", 0, 50 * MIB), ("take", 1, 50 * MIB)]
    events += [("give", 0, 0), ("give", 1, 0), ("take", 2, 100 * MIB)]
    assert reserved(events) == 200 * MIB


def test_a_stream_does_not_use_blocks_of_another() -> None:
    """A gathered unit has a segment of its own, though one is free."""
    events: list[Event] = [("take", 0, 50 * MIB), ("give", 0, 0)]
    events += [("take", 1, 50 * MIB), ("kind", 1, "All Gather")]
    assert reserved(events) == 100 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 5)), max_size=60))
def test_it_reserves_at_least_what_is_alive(asked: list[tuple[int, int]]) -> None:
    """And no more than all requests would take in segments of their own."""
    events: list[Event] = []
    alive: dict[int, int] = {}
    most = 0
    for size, place in asked:
        if place in alive:
            events.append(("give", place, 0))
        events.append(("take", place, size))
        alive[place] = size
        most = max(most, sum(alive.values()))
    assert most <= reserved(events) <= sum(max(20 * MIB, size + 2 * MIB) for size, _ in asked)
