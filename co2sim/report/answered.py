"""A case of a page with its result."""

from dataclasses import dataclass

from co2sim.case import Case
from co2sim.result import Result
from co2sim.totals import Totals


@dataclass(frozen=True, slots=True)
class Answered:
    """A case, its result, and what it takes to train the tokens that were `asked` for, if any.

    `cluster` is its name or file, as it was given, with what was varied; `strategy` names it there.
    """

    cluster: str
    strategy: str
    case: Case
    result: Result
    totals: Totals | None
    asked: bool = False
