"""SI type aliases, the strict parser for texts such as "200 Gbit/s", and short formats.

Inside the project every quantity is a plain float in the unit that its alias names; only this
module converts. A bit and a byte are spelled `bit` and `B`. Of the usual short forms those are read
that can mean one thing only: Gbps and Gb/s are bits, GBps is bytes; Gb, gb/s and mB are refused.
"""

import math
import re
from functools import lru_cache
from typing import Literal, TypeAlias

from co2sim.common.errors import UnitError
from co2sim.common.errors import given as shown

Seconds: TypeAlias = float
Bytes: TypeAlias = float
BytesPerSecond: TypeAlias = float
Flops: TypeAlias = float
FlopsPerSecond: TypeAlias = float
UsdPerSecond: TypeAlias = float
"""Or another currency's, where `Cluster.currency` says so."""
Watts: TypeAlias = float
KgPerKwh: TypeAlias = float
"""Kilograms of CO2 equivalents per kilowatt-hour."""

_Physical: TypeAlias = Literal["s", "B", "B/s", "FLOP", "FLOP/s", "W", "kg/kWh", ""]
_Money: TypeAlias = Literal["USD", "USD/s", "USD/B", "USD/B/s", "USD/kWh", "USD/kW/month"]
Unit: TypeAlias = Literal[_Physical, _Money]

EXAMPLES: dict[Unit, str] = {
    "s": "a time such as '5 us', '2 h' or '30 days'",
    "B": "a size such as '80 GB'",
    "B/s": "a bandwidth such as '200 Gbit/s'",
    "FLOP": "an amount of work such as '2 TFLOP'",
    "FLOP/s": "a speed such as '312 TFLOP/s'",
    "USD/s": "a price such as '2.5 USD/h' or '2.2 EUR/h'",
    "USD": "an amount of money such as '36000 USD'",
    "USD/B": "a price of traffic such as '0.09 USD/GB'",
    "USD/B/s": "a price of storage such as '20 USD/TB/month'",
    "USD/kWh": "a price of electricity such as '0.08 USD/kWh'",
    "USD/kW/month": "a price of a place such as '180 USD/kW/month'",
    "W": "a power such as '700 W' or '2.8 kW'",
    "kg/kWh": "a carbon intensity such as '56 g/kWh'",
    "": "a plain number",
}

_UNITS: dict[str, tuple[str, float]] = {
    **dict.fromkeys(("byte", "B"), ("B", 1.0)),
    "bit": ("B", 1 / 8),
    **dict.fromkeys(("second", "s"), ("s", 1.0)),
    **dict.fromkeys(("minute", "min"), ("s", 60.0)),
    **dict.fromkeys(("hour", "h"), ("s", 3600.0)),
    **dict.fromkeys(("day", "d"), ("s", 86400.0)),
    "week": ("s", 604800.0),
    "month": ("s", 31557600.0 / 12),
    "year": ("s", 31557600.0),
    **dict.fromkeys(("flop", "FLOP"), ("FLOP", 1.0)),
    **dict.fromkeys(("dollar", "USD"), ("USD", 1.0)),
    **dict.fromkeys(("watt", "W"), ("W", 1.0)),
    **dict.fromkeys(("watt_hour", "Wh"), ("Wh", 1.0)),
    **dict.fromkeys(("gram", "g"), ("g", 1.0)),
}
"""What each unit measures, and how much of it one is."""
_DIVISIBLE = {*("second", "s"), *("watt", "W"), *("watt_hour", "Wh"), *("gram", "g")}
"""Units of which there are thousandths: of the others m is refused, as mB may be meant as MB."""
_PREFIXES: dict[str, float] = {
    "": 1.0,
    **dict.fromkeys(("kilo", "k"), 1e3),
    **dict.fromkeys(("mega", "M"), 1e6),
    **dict.fromkeys(("giga", "G"), 1e9),
    **dict.fromkeys(("tera", "T"), 1e12),
    **dict.fromkeys(("peta", "P"), 1e15),
    **dict.fromkeys(("kibi", "Ki"), 2.0**10),
    **dict.fromkeys(("mebi", "Mi"), 2.0**20),
    **dict.fromkeys(("gibi", "Gi"), 2.0**30),
    **dict.fromkeys(("tebi", "Ti"), 2.0**40),
    **dict.fromkeys(("milli", "m"), 1e-3),
    **dict.fromkeys(("micro", "u", "µ"), 1e-6),
    **dict.fromkeys(("nano", "n"), 1e-9),
}

CURRENCIES = (
    *("USD", "EUR", "GBP", "CHF", "JPY", "CNY", "INR", "KRW", "SGD"),
    *("CAD", "AUD", "NZD", "SEK", "NOK", "DKK", "PLN", "CZK", "BRL"),
)
"""Currencies of prices, by ISO 4217. They are never converted: rates change."""

_QUANTITY = re.compile(
    r"(?P<number>[-+]?(?:\d++\.?+\d*+|\.\d++)(?:[eE][-+]?\d++)?+)\s*+(?P<unit>.*+)", re.ASCII
)
"""Without spaces around it. Nothing is tried twice, or long texts would take very long."""
_SPACE = " \t\n\r\f\v"
_COMMA = re.compile(r"\s*[-+]?\d*,\d")
_CURRENCY = re.compile(r"(?<![A-Za-z])([A-Za-z]++)\s*+/")
_SIGNS = {"$": "USD", "€": "EUR", "£": "GBP"}
_SIGNED_PRICE = re.compile(r"(?P<sign>[$€£]) *(?P<rest>[0-9.]+) */ *(?P<time>[A-Za-z]+)")
_UNIT = re.compile(r"[A-Za-z\u00b5]{1,20}(/[A-Za-z]{1,20}){0,2}")
_BITS = re.compile(
    r"(?P<prefix>[kKmMgGtTpP]?)(?:(?P<size>bits?)|bits?/s|bps)|(?P<large>[kKMGTP]?)b/s"
)
_BYTES_PER_SECOND = re.compile(r"(?P<size>(?:[kMGTP]i?|m)?B)ps")


def parse(text: str | float, unit: Unit) -> float:
    """Read a quantity, such as "200 Gbit/s", as a float in `unit`.

    A plain number is accepted only where `unit` is "" (dimensionless).
    Raises UnitError when there is no number, no unit, an unknown one, or one of another kind.
    """
    _refuse_comma(text)
    match = _QUANTITY.fullmatch(str(text).strip(_SPACE)) if not isinstance(text, bool) else None
    if match is None:
        raise UnitError(f"{shown(text)} is not {EXAMPLES[unit]}")
    if not match["unit"] and unit:
        raise UnitError(f"{shown(text)} has no unit; expected {EXAMPLES[unit]}")
    value = float(match["number"]) * _factor(match["unit"], unit)
    if not math.isfinite(value):
        raise UnitError(f"{shown(text)} is not finite")
    return value


def parse_price(text: str | float, unit: Unit = "USD/s") -> tuple[float, str]:
    """Read a price, such as "2.2 EUR/h", as a float per second, or in `unit`, and its currency.

    Raises UnitError like `parse`, for a currency that is not known, and below 0.
    """
    _refuse_comma(text)
    if signed := _SIGNED_PRICE.fullmatch(str(text).strip(_SPACE)):  # "$2.50/h"
        return parse_price(f"{signed['rest']} {_SIGNS[signed['sign']]}/{signed['time']}", unit)
    currency = _CURRENCY.search(str(text))
    code = currency[1] if currency else "USD"
    if currency and code not in CURRENCIES and code.upper() in CURRENCIES:
        raise UnitError(f"{shown(text)}: write the currency as {code.upper()}")
    if currency and code not in CURRENCIES:
        raise UnitError(
            f"{shown(text)}: unknown currency {shown(code)}; known: {', '.join(CURRENCIES)}"
        )
    try:
        price = parse(str(text).replace(code, "USD", 1) if currency else text, unit)
    except UnitError as error:
        if code == "USD":
            raise
        raise UnitError(f"{shown(text)} is not {EXAMPLES[unit]}") from error
    if price < 0:
        raise UnitError(f"{shown(text)} is below 0")
    return price, code


def _refuse_comma(text: str | float) -> None:
    """Refuse "0,95" and "1,000": the one is a fraction, the other a thousand."""
    if _COMMA.match(str(text)):
        raise UnitError(
            f"{shown(text)} has a comma in its number; write a decimal point (0.95), and thousands"
            " without a mark (1000)"
        )


def _usual(text: str) -> str:
    """A common way to write a rate or a number of bits, as `_UNITS` has it."""
    if bits := _BITS.fullmatch(text):
        prefix = bits["prefix"] or bits["large"] or ""
        prefix = "k" if prefix == "K" else prefix if prefix == "k" else prefix.upper()
        return prefix + ("bit" if bits["size"] else "bit/s")
    if rate := _BYTES_PER_SECOND.fullmatch(text):
        return f"{rate['size']}/s"
    return text


@lru_cache(maxsize=256)
def _factor(text: str, unit: Unit) -> float:
    """How many `unit` one of the unit `text` is."""
    text = _usual(text)
    if text == unit:
        return 1.0
    if not unit:
        raise UnitError(f"unit {shown(text)} where {EXAMPLES[unit]} is expected")
    if not _UNIT.fullmatch(text):
        raise UnitError(f"unknown unit {shown(text)}; expected {EXAMPLES[unit]}")
    if re.search(r"(^|/)[A-Za-z]{0,2}b(/|$)", text):
        raise UnitError(
            f"unit {shown(text)} is ambiguous: b may be bits or bytes; write bit (Gbit) or B (GB)"
        )
    kinds, size = _measured(text)
    expected, base = _measured(unit)
    if not kinds:
        raise UnitError(f"unknown unit {shown(text)}; expected {EXAMPLES[unit]}")
    if kinds != expected:
        raise UnitError(f"unit {shown(text)} does not fit; expected {EXAMPLES[unit]}")
    return size / base


def _measured(text: str) -> tuple[tuple[str, ...], float]:
    """What a unit such as "Gbit/s" measures, and how much one is; nothing if it is not known."""
    parts = [_single(name) for name in text.split("/")]
    if None in parts:
        return (), 0.0
    (kind, size), *under = (part for part in parts if part)
    return (kind, *(name for name, _ in under)), math.prod((1 / s for _, s in under), start=size)


def _single(name: str) -> tuple[str, float] | None:
    """The same for a unit with a prefix, in the plural or not: "Gbit", "gigabits"."""
    for bare in (name, name.removesuffix("s")):
        for prefix, factor in _PREFIXES.items():
            unit = bare.removeprefix(prefix) if bare.startswith(prefix) else ""
            if unit in _UNITS and (bare == name or len(unit) > 1):  # no "Bs"
                if factor < 1 and unit not in _DIVISIBLE:
                    raise UnitError(
                        f"unit {shown(name)}: {prefix} is a fraction, and nothing is measured in"
                        f" fractions of a {unit}; mega is M, as in M{unit}"
                    )
                return _UNITS[unit][0], factor * _UNITS[unit][1]
    return None


_FIRST_OF_FOUR_DIGITS = 999.5
"""The smallest number that is 1,000 when rounded to a whole one; ".3g" would write 1e+03."""


def scaled(value: float, unit: str) -> str:
    """Three significant digits with a decimal prefix: 1.25e10, "B/s" -> "12.5 GB/s"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def number(value: float) -> str:
    """Three significant figures below 1000, a whole number from there on: "1.00", "22,810"."""
    if abs(value) >= _FIRST_OF_FOUR_DIGITS:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def figures(value: float) -> str:
    """As `number`, with the zeros that say how exact it is: 1.0 -> "1.00"."""
    return number(value) if abs(value) >= _FIRST_OF_FOUR_DIGITS else f"{value:#.3g}".rstrip(".")


def percent(share: float, digits: int = 0) -> str:
    """A difference in per cent with its sign: "+4%", "-12%"; none for what rounds to nothing."""
    text = f"{share:+.{digits}%}"
    return text if float(text[:-1]) else text[1:]


def duration(seconds: Seconds) -> str:
    """A time in the unit that suits it: 0.00125 -> "1.25 ms"."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


_LONG = ((172800.0, 86400.0, "days"), (3600.0, 3600.0, "h"), (60.0, 60.0, "min"))
"""From how many seconds on which unit is used, and its seconds."""


def timespan(seconds: Seconds) -> str:
    """A time of minutes to years in the unit that suits it: 11_134 -> "3.09 h"."""
    for least, factor, unit in _LONG:
        if abs(seconds) >= least:
            return f"{number(seconds / factor)} {unit}"
    return duration(seconds)


def counted(count: float, noun: str) -> str:
    """A count with its noun: "1 node", "1,024 nodes"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
