"""Quantities: what is read, what is refused, and how it is shown."""

import math
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from co2sim.errors import UnitError
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
)

READ: list[tuple[str | float, Unit, float]] = [
    ("200 Gbit/s", "B/s", 25e9),
    ("25 GB/s", "B/s", 25e9),
    ("200 Gbps", "B/s", 25e9),
    ("200 gbps", "B/s", 25e9),
    ("200 Gb/s", "B/s", 25e9),
    ("200 gbit/s", "B/s", 25e9),
    ("200 Gbits/s", "B/s", 25e9),
    ("100 mbit/s", "B/s", 12.5e6),
    ("100 Mb/s", "B/s", 12.5e6),
    ("64 kbps", "B/s", 8e3),
    ("64 Kbit/s", "B/s", 8e3),
    ("8 bps", "B/s", 1.0),
    ("8 b/s", "B/s", 1.0),
    ("25 GBps", "B/s", 25e9),
    ("1 GiBps", "B/s", 2.0**30),
    ("8 gbit", "B", 1e9),
    ("300GB/s", "B/s", 300e9),
    ("80 GB", "B", 80e9),
    ("1 GiB", "B", 2.0**30),
    ("8 bit", "B", 1.0),
    ("5 us", "s", 5e-6),
    ("5 µs", "s", 5e-6),
    ("  1.5 ms ", "s", 1.5e-3),
    ("2 min", "s", 120.0),
    ("312 TFLOP/s", "FLOP/s", 312e12),
    ("1.34e12 FLOP", "FLOP", 1.34e12),
    ("2.52 USD/h", "USD/s", 0.0007),
    ("0.19", "", 0.19),
    (0.19, "", 0.19),
    (3, "", 3.0),
]


@pytest.mark.parametrize(("text", "unit", "value"), READ)
def test_quantities_are_read_in_si_units(text: str | float, unit: Unit, value: float) -> None:
    """A quantity becomes a plain number in the SI unit that is asked for."""
    assert parse(text, unit) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "unit", "said"),
    [
        ("25", "B/s", "has no unit"),
        (25.0, "B/s", "has no unit"),
        ("25 gb/s", "B/s", "ambiguous"),
        ("25 mb/s", "B/s", "ambiguous"),
        ("80 Gb", "B", "ambiguous"),
        ("80 Mb/h", "B/s", "ambiguous"),
        ("25 Gbps", "B", "does not fit"),
        ("25 GBPS", "B/s", "unknown unit"),
        ("25 GB", "B/s", "does not fit"),
        ("25 GB/s", "B", "does not fit"),
        ("25 parsec", "s", "unknown unit"),
        ("25 GB/s", "", "where a plain number is expected"),
        ("0,5 us", "s", "'0,5 us' has a comma in its number"),
        ("1,000 GB", "B", "thousands without a mark (1000)"),
        ("fast", "B/s", "is not a bandwidth"),
        ("", "s", "is not a time"),
        ("nan s", "s", "is not a time"),
        ("inf s", "s", "is not a time"),
        ("1e999 s", "s", "is not finite"),
        (math.inf, "", "is not a plain number"),
        (True, "", "is not a plain number"),
    ],
)
def test_wrong_quantities_are_refused_in_words(text: str | float, unit: Unit, said: str) -> None:
    """A missing, ambiguous, unknown or unfit unit is an error that says which it is."""
    with pytest.raises(UnitError) as caught:
        parse(text, unit)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "5 NAN",
        "5 (",
        "5 {",
        "5 #",
        "5 '",
        "5 \\",
        "5 \0",
        "5 s/",
        "5 1/0",
        "5 s**(1/0)",
        "1e308 Ts",
    ],
)
def test_malformed_units_are_refused_like_unknown_ones(text: str) -> None:
    """No text, however broken, gets past the parser as anything but a UnitError."""
    with pytest.raises(UnitError):
        parse(text, "s")


@pytest.mark.parametrize(
    ("text", "price", "currency"),
    [
        ("3.6 USD/h", 0.001, "USD"),
        ("3.6 EUR/h", 0.001, "EUR"),
        ("3.6EUR/h", 0.001, "EUR"),
        ("60 JPY/min", 1.0, "JPY"),
    ],
)
def test_a_price_keeps_its_currency(text: str, price: float, currency: str) -> None:
    """Prices are read per second, and never converted from one currency to another."""
    assert parse_price(text) == (pytest.approx(price), currency)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2.5", "has no unit"),
        ("2.5 USD", "does not fit"),
        ("2.5 eur/h", "write the currency as EUR"),
        ("2.5 XXX/h", "unknown currency 'XXX'"),
        ("2.5 EUR/GB", "'2.5 EUR/GB' is not a price"),
        ("0,95 EUR/h", "'0,95 EUR/h' has a comma in its number; write a decimal point (0.95)"),
        ("cheap", "is not a price"),
        ("-2 EUR/h", "is below 0"),
    ],
)
def test_wrong_prices_are_refused_in_words(text: str, said: str) -> None:
    """A price needs a number, a known currency, and a time."""
    with pytest.raises(UnitError) as caught:
        parse_price(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(("number", "said"), [(1, "1 node"), (0, "0 nodes"), (1024, "1,024 nodes")])
def test_counts_are_said_with_their_noun(number: int, said: str) -> None:
    """One is singular; others are plural, with commas."""
    assert counted(number, "node") == said


def test_a_double_slash_is_not_a_slash() -> None:
    """The parser is strict: "B//s" is not a bandwidth."""
    with pytest.raises(UnitError):
        parse("5 B//s", "B/s")


@given(st.text(max_size=12), st.sampled_from(list(EXAMPLES)))
@example("5 [", "s")
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


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.25e10, "12.5 GB/s"), (999.0, "999 B/s"), (0.0, "0 B/s"), (2e15, "2 PB/s"), (1e3, "1 kB/s")],
)
def test_values_are_shown_with_three_digits_and_a_prefix(value: float, shown: str) -> None:
    """A value is shown with a decimal prefix and three significant digits."""
    assert scaled(value, "B/s") == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(1.25e-3, "1.25 ms"), (3.0, "3 s"), (2e-6, "2 us"), (5e-9, "5 ns"), (0.0, "0 s")],
)
def test_times_are_shown_in_the_unit_that_suits_them(seconds: float, shown: str) -> None:
    """A time is shown in seconds, milli-, micro- or nanoseconds."""
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0763, "0.0763"), (1.06, "1.06"), (22.46, "22.5"), (999.4, "999")),
        *((1.0, "1.00"), (0.998, "0.998"), (0.9999, "1.00"), (80.0, "80.0"), (180.0, "180")),
        *((999.6, "1,000"), (22_810.4, "22,810"), (-22_810.4, "-22,810")),
    ],
)
def test_numbers_have_three_significant_figures(value: float, text: str) -> None:
    """Whole from a thousand on, without an exponent."""
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1.00"), (1.06, "1.06"), (0.0012, "0.00120"), (999.4, "999"), (22_810.4, "22,810")],
)
def test_figures_keep_their_zeros(value: float, text: str) -> None:
    """1 beside 1.06 is 1.00: it is known as exactly."""
    assert figures(value) == text


@pytest.mark.parametrize(
    ("share", "whole", "tenths"),
    [
        (-0.001, "0%", "-0.1%"),
        (-0.0004, "0%", "0.0%"),
        (-0.0, "0%", "0.0%"),
        (0.004, "0%", "+0.4%"),
        (0.04, "+4%", "+4.0%"),
        (-0.12, "-12%", "-12.0%"),
    ],
)
def test_no_difference_has_no_sign(share: float, whole: str, tenths: str) -> None:
    """What is rounded to nothing is neither above nor below."""
    assert (percent(share), percent(share, 1)) == (whole, tenths)


@pytest.mark.parametrize(
    "text",
    [
        "1" * 10**6 + "\n\nx",
        "1 a" + " " * 10**6 + "a",
        "1 " + "a" * 10**6,
        "1 B/" + "s" * 10**6,
        "a" * 10**6,
        "1 a" + "\n" * 10**6 + "b",
    ],
    ids=["digits", "spaces", "unit", "rate", "letters", "lines"],
)
def test_long_texts_are_refused_in_linear_time(text: str) -> None:
    """A megabyte takes a moment; in quadratic time it would be many minutes."""
    began = time.process_time()
    for read in (lambda: parse(text, "B/s"), lambda: parse(text, ""), lambda: parse_price(text)):
        with pytest.raises(UnitError):
            read()
    assert time.process_time() - began < 5


def test_spaces_around_a_quantity_do_not_matter() -> None:
    """Those of ASCII; a quantity with another line behind it is none."""
    assert parse(" \t\n12.5 GB/s \r\n", "B/s") == 12.5e9
    assert parse(" 3.\n", "") == 3
    for text in ("1 GB/s\u00a0", "1 GB\n/s", "1 . 5", "1e 5"):
        with pytest.raises(UnitError):
            parse(text, "B/s")
