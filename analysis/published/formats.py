"""Numbers and names as the report prints them."""

from collections.abc import Mapping

from analysis.published.parameters import Constant
from co2sim.common import units


def three_decimals(value: float) -> str:
    """With three digits behind the point."""
    return f"{value:.3f}"


def percent(value: float | None) -> str:
    """In percent, with one digit behind the point; a dash for nothing."""
    return "-" if value is None else f"{value:.1%}"


def whole_percent(value: float | None) -> str:
    """In whole percent; a dash for nothing."""
    return "-" if value is None else f"{value:.0%}"


def signed(value: float) -> str:
    """In percent, with its sign; none for what rounds to zero."""
    return units.percent(value, 1)


def words(text: str) -> str:
    """A name with blanks for underscores."""
    return text.replace("_", " ")


def cell(text: str) -> str:
    """A text inside a Markdown table."""
    return text.replace("|", r"\|")


def at_bound(constant: Constant, value: float) -> str:
    """A value of a constant, and whether it is at a bound."""
    return constant.shown(value) + (" (at bound)" if constant.at_bound(value) else "")


def labelled(errors: Mapping[str, float]) -> str:
    """Errors by label, in one line; a dash for none."""
    return ", ".join(f"{words(name)} {percent(error)}" for name, error in errors.items()) or "-"
