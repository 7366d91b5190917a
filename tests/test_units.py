"""Numbers of users: quantities with units, ranges, how both are shown, and what is refused."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from co2sim.errors import OptionError, ScheduleError, UnitError
from co2sim.quantities import Quantity, check, in_order
from co2sim.units import (
    EXAMPLES,
    Unit,
    counted,
    duration,
    figures,
    number,
    parse,
    parse_price,
    percent,
    scaled,
    timespan,
)
from co2sim.validation import above, at_least, between, fraction, parse_number, whole

READ: dict[str, tuple[Unit, float]] = {
    "200 Gbit/s": ("B/s", 25e9),
    "25 GB/s": ("B/s", 25e9),
    "200 Gbps": ("B/s", 25e9),
    "200 gbps": ("B/s", 25e9),
    "200 Gb/s": ("B/s", 25e9),
    "200 gbit/s": ("B/s", 25e9),
    "200 Gbits/s": ("B/s", 25e9),
    "100 mbit/s": ("B/s", 12.5e6),
    "100 Mb/s": ("B/s", 12.5e6),
    "64 kbps": ("B/s", 8e3),
    "64 Kbit/s": ("B/s", 8e3),
    "8 bps": ("B/s", 1.0),
    "8 b/s": ("B/s", 1.0),
    "25 GBps": ("B/s", 25e9),
    "1 GiBps": ("B/s", 2.0**30),
    "300GB/s": ("B/s", 300e9),
    " \t\n12.5 GB/s \r\n": ("B/s", 12.5e9),
    "8 gbit": ("B", 1e9),
    "80 GB": ("B", 80e9),
    "1 GiB": ("B", 2.0**30),
    "8 bit": ("B", 1.0),
    "5 us": ("s", 5e-6),
    "5 µs": ("s", 5e-6),
    "  1.5 ms ": ("s", 1.5e-3),
    "2 min": ("s", 120.0),
    "3 days": ("s", 259_200.0),
    "312 TFLOP/s": ("FLOP/s", 312e12),
    "1.34e12 FLOP": ("FLOP", 1.34e12),
    "2.52 USD/h": ("USD/s", 0.0007),
    "56 g/kWh": ("kg/kWh", 0.056),
    "2.8 kW": ("W", 2800.0),
    "0.19": ("", 0.19),
    " 3.\n": ("", 3.0),
}


def test_quantities_are_read_in_si_units() -> None:
    """A quantity becomes a plain number in the SI unit that is asked for; numbers stay numbers."""
    found = {text: (unit, parse(text, unit)) for text, (unit, _) in READ.items()}
    assert found == {
        text: (unit, pytest.approx(value, rel=1e-12)) for text, (unit, value) in READ.items()
    }
    assert (parse(0.19, ""), parse(3, "")) == (0.19, 3.0)


@pytest.mark.parametrize(
    ("text", "unit", "token"),
    [
        ("25", "B/s", "has no unit"),
        (25.0, "B/s", "has no unit"),
        ("25 gb/s", "B/s", "ambiguous"),
        ("80 Gb", "B", "ambiguous"),
        ("80 Mb/h", "B/s", "ambiguous"),
        ("25 Gbps", "B", "does not fit"),
        ("25 GB", "B/s", "does not fit"),
        ("25 GB/s", "B", "does not fit"),
        ("25 GBPS", "B/s", "unknown unit"),
        ("25 parsec", "s", "unknown unit"),
        ("25 GB/s", "", "plain number"),
        ("0,5 us", "s", "comma"),
        ("1,000 GB", "B", "comma"),
        ("fast", "B/s", "is not a bandwidth"),
        ("", "s", "is not a time"),
        ("nan s", "s", "is not a time"),
        ("inf s", "s", "is not a time"),
        ("1e999 s", "s", "is not finite"),
        (math.inf, "", "is not a plain number"),
        (True, "", "is not a plain number"),
        ("1 GB/s\u00a0", "B/s", "unknown unit"),
        ("1 GB\n/s", "B/s", "is not a bandwidth"),
        ("5 B//s", "B/s", "unknown unit"),
        ("1e 5", "B/s", "unknown unit"),
    ],
)
def test_wrong_quantities_are_refused(text: str | float, unit: Unit, token: str) -> None:
    """A missing, ambiguous, unknown or unfit unit is an error that says which it is."""
    with pytest.raises(UnitError) as caught:
        parse(text, unit)
    assert token in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.text(max_size=12) | st.text("0123456789.eE+-/*()[]{}#'\\ sBGbit", max_size=12),
    st.sampled_from(list(EXAMPLES)),
)
@example("NAN", "s")
@example("s**(1/0)", "s")
@example("\0", "s")
@example("[", "s")
@example("1e308 kB", "B")
def test_any_text_is_a_finite_number_or_one_line(text: str, unit: Unit) -> None:
    """Whatever is given, the answer is a finite number or a UnitError of one line."""
    for candidate in (text, f"5 {text}"):
        try:
            value = parse(candidate, unit)
        except UnitError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 - both outcomes are right
        else:
            assert math.isfinite(value)


@given(st.floats(1e-3, 1e6), st.sampled_from(["", "k", "M", "G", "T"]))
def test_a_byte_is_eight_bits(number: float, prefix: str) -> None:
    """The same number of bits is an eighth of the bytes, under every prefix."""
    in_bytes = parse(f"{number!r} {prefix}B/s", "B/s")
    assert parse(f"{number!r} {prefix}bit/s", "B/s") == pytest.approx(in_bytes / 8, rel=1e-12)


def test_a_price_keeps_its_currency() -> None:
    """Prices are read per second, and never converted from one currency to another."""
    prices = {"3.6 USD/h": (0.001, "USD"), "3.6EUR/h": (0.001, "EUR"), "60 JPY/min": (1.0, "JPY")}
    for text, (price, currency) in prices.items():
        assert parse_price(text) == (pytest.approx(price), currency)


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("2.5", "has no unit"),
        ("2.5 USD", "does not fit"),
        ("2.5 eur/h", "EUR"),
        ("2.5 XXX/h", "unknown currency 'XXX'"),
        ("2.5 EUR/GB", "is not a price"),
        ("0,95 EUR/h", "comma"),
        ("cheap", "is not a price"),
        ("-2 EUR/h", "is below 0"),
    ],
)
def test_wrong_prices_are_refused(text: str, token: str) -> None:
    """A price needs a number, a known currency, and a time."""
    with pytest.raises(UnitError) as caught:
        parse_price(text)
    assert token in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 10**6 + "\n\nx",
        "1 a" + " " * 10**6 + "a",
        "1 " + "a" * 10**6,
        "1 B/" + "s" * 10**6,
        "a" * 10**6,
    ],
    ids=["digits", "spaces", "unit", "rate", "letters"],
)
def test_long_texts_are_refused_in_linear_time(text: str) -> None:
    """A megabyte takes a moment; in quadratic time it would be many minutes."""
    began = time.process_time()
    for read in (lambda: parse(text, "B/s"), lambda: parse(text, ""), lambda: parse_price(text)):
        with pytest.raises(UnitError):
            read()
    assert time.process_time() - began < 5


# --- how numbers are shown ----------------------------------------------------------------------

SHOWN: list[tuple[Callable[..., str], dict[tuple[Any, ...], str]]] = [
    (counted, {(1, "node"): "1 node", (0, "node"): "0 nodes", (1024, "GPU"): "1,024 GPUs"}),
    (
        scaled,
        {
            (1.25e10, "B/s"): "12.5 GB/s",
            (999.0, "B/s"): "999 B/s",
            (0.0, "B/s"): "0 B/s",
            (2e15, "B/s"): "2 PB/s",
            (1e3, "B/s"): "1 kB/s",
        },
    ),
    (duration, {(1.25e-3,): "1.25 ms", (3,): "3 s", (2e-6,): "2 us", (5e-9,): "5 ns", (0,): "0 s"}),
    (
        timespan,
        {
            (172_800,): "2.00 days",
            (172_799,): "48.0 h",
            (3600,): "1.00 h",
            (60,): "1.00 min",
            (59,): "59 s",
        },
    ),
    (
        number,
        {
            (0.0763,): "0.0763",
            (1.06,): "1.06",
            (22.46,): "22.5",
            (999.4,): "999",
            (1.0,): "1.00",
            (0.9999,): "1.00",
            (80.0,): "80.0",
            (180.0,): "180",
            (999.5,): "1,000",
            (22_810.4,): "22,810",
            (-22_810.4,): "-22,810",
        },
    ),
    (figures, {(1.0,): "1.00", (0.0012,): "0.00120", (999.4,): "999", (22_810.4,): "22,810"}),
    (
        percent,
        {
            (-0.001,): "0%",
            (-0.0,): "0%",
            (0.04,): "+4%",
            (-0.12,): "-12%",
            (-0.001, 1): "-0.1%",
            (-0.0004, 1): "0.0%",
            (0.004, 1): "+0.4%",
        },
    ),
]


@pytest.mark.parametrize(("show", "wanted"), SHOWN, ids=lambda one: getattr(one, "__name__", ""))
def test_numbers_are_shown_with_three_figures(
    show: Callable[..., str], wanted: dict[tuple[Any, ...], str]
) -> None:
    """Counts with their noun; what is rounded to nothing has no sign; large ones have commas."""
    assert {given_: show(*given_) for given_ in wanted} == wanted


# --- ranges -------------------------------------------------------------------------------------

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


@pytest.mark.parametrize(("checked", "allowed"), CHECKS)
@given(value=anything)
@example(value=2)
@example(value=-2)
@example(value=3)
@example(value=math.nan)
def test_a_number_in_range_comes_back_and_all_else_is_one_line(
    checked: Callable[[Any], float], allowed: Callable[[float], bool], value: Any
) -> None:
    """NaN, infinity, truth values and texts are in no range."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and value not in {math.inf, -math.inf, 10**400} and allowed(value):
        assert checked(value) in {value, float(value)}  # an integer may have too many digits
        return
    with pytest.raises(OptionError) as caught:
        checked(value)
    assert str(caught.value).startswith("x is ")
    assert "; it must be " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "given_", "allowed"),
    [
        (lambda: at_least("tau", 0, 1), "tau is 0;", "at least 1"),
        (lambda: at_least("load", math.nan, 0), "load is nan;", "finite"),
        (lambda: above("speed", 0.0, 0), "speed is 0.0;", "above 0"),
        (lambda: between("x", 2e12, 0, 1e12), "x is 2000000000000.0;", "0 to 1e+12"),
        (lambda: fraction("share", 1.5), "share is 1.5;", "at most 1"),
        (lambda: whole("gpus", 2.5, 1), "gpus is 2.5;", "whole number"),
        (lambda: whole("gpus", 0, 1, 8), "gpus is 0;", "1 to 8"),
        (lambda: whole("gpus", np.True_, 1), "gpus is np.True_;", "whole number"),
        (lambda: whole("gpus", "8", 1), "gpus is '8';", "whole number"),  # type: ignore[arg-type]
        (lambda: whole("n", 2**64, 1, 8), f"n is {2**64};", "1 to 8"),
        (lambda: whole("n", -(10**400), 1), "20 digits;", "at least 1"),
        (lambda: whole("n", 0, 1, 10**60), "n is 0;", "1 to 1e+60"),
        (lambda: parse_number("x", "-1"), "x is '-1';", "0 or more"),
    ],
)
def test_the_line_has_what_was_given_and_what_is_allowed(
    make: Callable[[], float], given_: str, allowed: str
) -> None:
    """Numbers as a user would write them, unless they have too many digits."""
    with pytest.raises(OptionError) as caught:
        make()
    before, _, after = str(caught.value).partition(given_)
    assert given_ in str(caught.value)
    assert "it must be" not in before
    assert allowed in after


def test_numbers_of_numpy_and_texts_are_numbers() -> None:
    """They come back as Python's own, so that they can be written as JSON."""
    assert type(whole("n", np.int64(3), 1)) is int
    assert type(whole("n", np.float32(3), 1)) is int
    assert type(at_least("x", np.float32(0.5), 0)) is float
    with pytest.raises(OptionError, match=r"x is 0\.0"):
        above("x", np.float64(0), 0)
    assert (parse_number("x", "5e8"), parse_number("x", "0.5")) == (500_000_000, 0.5)


def test_the_error_may_be_another_one() -> None:
    """A module that has an error of its own raises that."""
    with pytest.raises(ScheduleError, match="nodes is 0"):
        whole("nodes", 0, 1, error=ScheduleError)


@dataclass(frozen=True)
class Thing:
    """One field of each kind of range."""

    count: Annotated[int, Quantity(least=1, most=8)] = 1
    size: Annotated[float, Quantity(unit="B", least=1)] = 1.0
    positive: Annotated[float, Quantity(unit="s")] | None = None
    share: Annotated[float, Quantity(most=1)] = 1.0
    latency: Annotated[float, Quantity(unit="s", least=0)] = 0.0
    spread: Annotated[float, Quantity(least=0, most=5)] = 0.0
    low: Annotated[float, Quantity(unit="W", least=0)] | None = None
    high: Annotated[float, Quantity(unit="W", least=0)] | None = None


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"count": 0}, "1 to 8"),
        ({"count": 9}, "1 to 8"),
        ({"count": 1.5}, "whole number"),
        ({"size": 0.5}, "at least 1"),
        ({"positive": 0.0}, "above 0"),
        ({"share": 1.5}, "at most 1"),
        ({"spread": 5.1}, "0 to 5"),
        ({"size": 2e60}, "1e+60"),
        ({"share": 1e-19}, "1e-18"),
        ({"low": 2.0, "high": 1.0}, "low is 2 W, above high"),
    ],
    ids=str,
)
def test_fields_of_a_dataclass_have_the_ranges_that_they_declare(
    changes: dict[str, Any], token: str
) -> None:
    """And none is so small or so large that figures from it would be lost."""
    for good in ({}, {"count": 8.0, "latency": 1e-300, "low": 1.0, "high": 1.0}):
        thing = Thing(**good)  # type: ignore[arg-type]
        check(thing, "thing")
        in_order(thing, "thing", "low", "high")
        assert type(thing.count) is int
    wrong = Thing(**changes)
    with pytest.raises(OptionError, match=r"^thing: ") as caught:
        in_order(wrong, "thing", "low", "high") if "low" in changes else check(wrong, "thing")
    assert token in str(caught.value)
