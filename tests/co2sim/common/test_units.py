"""Numbers of users: quantities with units, ranges, how both are shown, and what is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from co2sim.common.errors import OptionError, UnitError
from co2sim.common.units import EXAMPLES, Unit, parse, parse_price
from co2sim.common.validation import above, at_least, between, fraction, whole

READ: dict[str, tuple[Unit, float]] = {
    "200 Gbit/s": ("B/s", 25e9),
    "200 gbps": ("B/s", 25e9),
    "100 mbit/s": ("B/s", 12.5e6),
    "64 kbps": ("B/s", 8e3),
    "8 bps": ("B/s", 1.0),
    "1 GiBps": ("B/s", 2.0**30),
    "300GB/s": ("B/s", 300e9),
    " \t\n12.5 GB/s \r\n": ("B/s", 12.5e9),
    "80 GB": ("B", 80e9),
    "1 GiB": ("B", 2.0**30),
    "5 µs": ("s", 5e-6),
    "  1.5 ms ": ("s", 1.5e-3),
    "2 min": ("s", 120.0),
    "312 TFLOP/s": ("FLOP/s", 312e12),
    "1.34e12 FLOP": ("FLOP", 1.34e12),
    "2.52 USD/h": ("USD/s", 0.0007),
    "56 g/kWh": ("kg/kWh", 0.056),
    "0.19": ("", 0.19),
}


def test_quantities_are_read_in_si_units() -> None:
    """A quantity becomes a plain number in the SI unit that is asked for; numbers stay numbers."""
    found = {text: (unit, parse(text, unit)) for text, (unit, _) in READ.items()}
    assert found == {
        text: (unit, pytest.approx(value, rel=1e-12)) for text, (unit, value) in READ.items()
    }
    assert (parse(0.19, ""), parse(3, "")) == (0.19, 3.0)


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


@pytest.mark.parametrize("prefix", ["m", "u", "µ", "n", "milli", "micro"])
def test_there_are_no_thousandths_of_what_is_counted(prefix: str) -> None:
    """mB, mFLOP or mUSD may be meant as mega, so they are refused; ms and mW are not."""
    units = ("B", "byte", "bytes", "FLOP", "flops", "bit", "bits", "USD", "min", "days")
    for under in ("", "/s", "/h"):
        for name in units:
            if prefix == "m" and name in {"bit", "bits"}:
                continue  # read as megabits
            for expected in EXAMPLES:
                with pytest.raises(UnitError):
                    parse(f"5 {prefix}{name}{under}", expected)
    assert parse(f"5 {prefix}s", "s") == parse(f"5 {prefix}W", "W") < 0.01


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
    ("text", "meaning"), [("$2.50/h", "2.5 USD/h"), ("€2/h", "2 EUR/h"), ("£ 3 / h", "3 GBP/h")]
)
def test_prices_may_begin_with_a_sign(text: str, meaning: str) -> None:
    """Of a currency that has one of its own."""
    assert parse_price(text) == parse_price(meaning)
