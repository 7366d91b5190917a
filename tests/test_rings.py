"""In which order the segments of a collective go around a ring."""

from hypothesis import given
from hypothesis import strategies as st

from realrun.execute.rings import _along


@given(st.integers(1, 8), st.integers(1, 20))
def test_all_segments_are_on_their_way_at_once(steps: int, count: int) -> None:
    """Every segment makes every step once, in order; a segment ends before one that is a ring on.

    So members end together, and not those behind a slow link when two thirds have crossed it.
    """
    order = list(_along(steps, count))
    assert sorted(order) == [(step, number) for step in range(steps) for number in range(count)]
    place = {pair: index for index, pair in enumerate(order)}
    for step, number in order:
        if step:
            assert place[step - 1, number] < place[step, number]
        if number >= steps:
            assert place[steps - 1, number - steps] < place[0, number]
