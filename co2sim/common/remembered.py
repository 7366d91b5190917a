"""Results that are remembered by the very objects that they are of."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class _Same(Generic[T]):
    """An object that equals only itself, without comparing or hashing what it holds."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def remembered(objects: int, most: int) -> Callable[[F], F]:
    """Keep the last `most` results of a function of frozen arguments.

    The first `objects` arguments count by identity: frozen objects of many parts take as long to
    hash as the answer takes, and equal ones may differ in fields that do not compare. All others
    are hashable. What raises is not kept.
    """

    def decorate(function: F) -> F:
        @lru_cache(maxsize=most)
        def known(same: tuple[_Same[Any], ...], rest: tuple[Hashable, ...]) -> Any:
            return function(*(one.value for one in same), *rest)

        @wraps(function)
        def asked(*given: Any) -> Any:
            return known(tuple(map(_Same, given[:objects])), given[objects:])

        return cast("F", asked)

    return decorate
