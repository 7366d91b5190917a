"""Range checks: what is in range comes back, all else is one line that says what is allowed."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from co2sim.errors import OptionError, ScheduleError
from co2sim.ranges import above, at_least, between, fraction, parse_number, whole

anything = st.one_of(
    *(st.none(), st.booleans(), st.text(max_size=3), st.just([1]), st.just(10**400)),
    *(st.integers(), st.integers(-3, 4), st.floats()),
)

CHECKS: list[tuple[Callable[[Any], float], Callable[[float], bool]]] = [
    (lambda x: at_least("x", x, 2), lambda x: x >= 2),
    (lambda x: above("x", x, 2), lambda x: x > 2),
    (lambda x: between("x", x, -1, 3), lambda x: -1 <= x <= 3),
    (lambda x: fraction("x", x), lambda x: 0 < x <= 1),
    (lambda x: whole("x", x, 1), lambda x: x >= 1 and x == math.floor(x)),
    (lambda x: whole("x", x, -2, 2), lambda x: -2 <= x <= 2 and x == math.floor(x)),
]


@pytest.mark.parametrize(("check", "allowed"), CHECKS)
@given(value=anything)
def test_a_number_in_range_comes_back_and_all_else_is_one_line(
    check: Callable[[Any], float], allowed: Callable[[float], bool], value: Any
) -> None:
    """NaN, infinity, truth values and texts are in no range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value not in {math.inf, -math.inf, 10**400} and allowed(value):
        assert check(value) == value
        return
    with pytest.raises(OptionError) as caught:
        check(value)
    assert str(caught.value).startswith("x is ")
    assert "; it must be " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (lambda: at_least("tau", 0, 1), "tau is 0; it must be at least 1"),
        (lambda: at_least("load", math.nan, 0), "load is nan; it must be finite and at least 0"),
        (lambda: above("speed", 0.0, 0), "speed is 0.0; it must be above 0"),
        (lambda: between("seed", 9, 0, 7), "seed is 9; it must be 0 to 7"),
        (lambda: between("x", 2e12, 0, 1e12), "x is 2000000000000.0; it must be 0 to 1e+12"),
        (lambda: fraction("share", 1.5), "share is 1.5; it must be above 0 and at most 1"),
        (lambda: whole("gpus", 2.5, 1), "gpus is 2.5; it must be a whole number, at least 1"),
        (lambda: whole("gpus", 0, 1, 8), "gpus is 0; it must be 1 to 8"),
        (
            lambda: whole("gpus", np.True_, 1),
            "gpus is np.True_; it must be a whole number, at least 1",
        ),
        (lambda: whole("gpus", "8", 1), "gpus is '8'; it must be a whole number, at least 1"),
        (lambda: whole("n", 2**64, 1, 8), f"n is {2**64}; it must be 1 to 8"),
        (
            lambda: whole("n", -(10**400), 1),
            "n is a number of more than 20 digits; it must be at least 1",
        ),
        (lambda: whole("n", 0, 1, 10**60), "n is 0; it must be 1 to 1e+60"),
        (lambda: parse_number("x", "-1"), "x is '-1'; it must be a number, 0 or more"),
    ],
)
def test_the_line_says_what_was_given_and_what_is_allowed(
    check: Callable[[], float], said: str
) -> None:
    """One line each, in words that need no source code."""
    with pytest.raises(OptionError) as caught:
        check()
    assert str(caught.value) == said


def test_numbers_of_numpy_are_numbers() -> None:
    """They come back as Python's own, so that they can be written as JSON."""
    assert type(whole("n", np.int64(3), 1)) is int
    assert type(whole("n", np.float32(3), 1)) is int
    assert type(at_least("x", np.float32(0.5), 0)) is float
    with pytest.raises(OptionError, match=r"x is 0\.0"):
        above("x", np.float64(0), 0)


def test_the_error_may_be_another_one() -> None:
    """A module that has an error of its own raises that."""
    with pytest.raises(ScheduleError, match="nodes is 0"):
        whole("nodes", 0, 1, error=ScheduleError)


def test_texts_are_read_in_any_notation() -> None:
    """5e8 is a number, as 0.5 is."""
    assert (parse_number("x", "5e8"), parse_number("x", "0.5")) == (500_000_000, 0.5)
