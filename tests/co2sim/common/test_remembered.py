"""Results that are remembered by the objects that they are of."""

from dataclasses import dataclass, field

import pytest

from co2sim.common.resources import remembered


@dataclass(frozen=True)
class Half:
    """Two with the same `shown` are equal, whatever they hide."""

    shown: int
    hidden: int = field(compare=False)


asked: list[tuple[Half, int]] = []


@remembered(objects=1, most=2)
def total(one: Half, more: int) -> int:
    """The sum; 0 is refused."""
    asked.append((one, more))
    if not more:
        raise ValueError(more)
    return one.shown + one.hidden + more


def test_a_result_is_that_of_the_very_object() -> None:
    """Equal objects that differ in what does not compare have results of their own."""
    one, other = Half(1, 10), Half(1, 20)
    assert one == other
    assert (total(one, 5), total(other, 5)) == (16, 26)


def test_the_same_question_is_answered_once() -> None:
    """Another argument is another question, and what is refused is asked again."""
    one = Half(2, 3)
    asked.clear()
    assert [total(one, 1), total(one, 1), total(one, 2)] == [6, 6, 7]
    assert asked == [(one, 1), (one, 2)]
    for _ in range(2):
        with pytest.raises(ValueError, match="0"):
            total(one, 0)
    assert asked[2:] == [(one, 0), (one, 0)]
