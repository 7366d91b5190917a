"""Random legal schedules for Hypothesis."""

from typing import Any

from hypothesis import strategies as st

from co2sim.schedule.schedule import After, Op, Schedule, Work

NAMES = st.sampled_from([f"op{number}" for number in range(10)])


@st.composite
def random_schedules(
    draw: st.DrawFn,
    works: st.SearchStrategy[Any],
    streams: list[str],
    names: st.SearchStrategy[str] = NAMES,
    most: int = 8,
) -> Schedule:
    """Up to `most` ops: any streams, waits for ops before, or for any op up to 3 rounds back."""
    chosen = draw(st.lists(names, min_size=1, max_size=most, unique=True))
    waits = st.lists(st.tuples(st.sampled_from(range(len(chosen))), st.integers(0, 2)), max_size=3)
    body = []
    for index, name in enumerate(chosen):
        after = tuple(After(chosen[op], ago + (op >= index)) for op, ago in draw(waits))
        work: Work = draw(works)
        body.append(Op(name, work, draw(st.sampled_from(streams)), after))
    return Schedule("random", tuple(body))
