"""What a test takes for granted."""

from typing import TypeVar

T = TypeVar("T")


def not_none(value: T | None) -> T:
    """The value, which must be there."""
    assert value is not None
    return value
