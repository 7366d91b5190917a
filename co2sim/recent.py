"""The last few answers to a question, by what was given: for what is slow to hash."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most `most` answers, the last used first.

    What was given must be frozen. It is compared, not hashed: the same object is equal to itself
    without a look inside, where a model has hundreds of numbers, and a schedule thousands of ops.
    """

    def __init__(self, most: int) -> None:
        """Start without an answer."""
        self._most = most
        self._known: list[tuple[K, V]] = []

    def find(self, given: K) -> V | None:
        """The answer to what is equal to `given`, if it is known."""
        known = self._known  # another thread may put a new list in its place
        for place, pair in enumerate(known):
            if pair[0] == given:
                if place:
                    self._known = [pair, *known[:place], *known[place + 1 :]]
                return pair[1]
        return None

    def keep(self, given: K, answer: V) -> V:
        """Remember an answer, and give it back; the one that was not used for longest may go."""
        self._known = [(given, answer), *self._known[: self._most - 1]]
        return answer
