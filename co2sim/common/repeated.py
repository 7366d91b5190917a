"""Options that may be given several times, but not twice the same."""

from collections import Counter
from collections.abc import Iterable

from co2sim.common.errors import OptionError


def refuse_twice(what: str, given: Iterable[str]) -> None:
    """Raise OptionError for what is given twice."""
    repeated = [name for name, times in Counter(given).items() if times > 1]
    if repeated:
        raise OptionError(f"{what} {repeated[0]} is given twice")
