"""An average that is used some local steps after its launch, without a restart from it."""

import re
from dataclasses import dataclass

from co2sim.common import validation
from co2sim.common.errors import OptionError

MOST_STEPS = 100_000
"""The longest delay in local steps; a round has at most as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """How a late average is used: `steps` local steps after its launch, without a restart.

    At the arrival workers move to the new anchor, plus `keep` of what they did since the launch,
    plus `predict` x steps/tau of the mean displacement that has just arrived. `steps` is d, from 1
    to tau; `keep` is in (0, 1]: what is thrown away altogether has no bound. `predict` is in
    [0, 1), so that what is predicted, and is part of the next displacement, dies out.

    Raises OptionError for what is out of range. Source: docs/theory.md, the late average.
    """

    steps: int
    keep: float = 1.0
    predict: float = 0.0

    def __post_init__(self) -> None:
        validation.whole("delay", self.steps, 1, MOST_STEPS)
        validation.fraction("keep", self.keep)
        if not 0 <= self.predict < 1:
            raise OptionError(f"predict is {self.predict:g}; it must be at least 0 and below 1")

    def carried(self, local_steps: int) -> float:
        """The share p of a displacement that is part of the next one, by prediction."""
        return self.predict * self.steps / local_steps

    def counted(self, local_steps: int) -> float:
        """The steps of a round, of which those before the arrival count `keep` each."""
        return self.keep * self.steps + local_steps - self.steps


@dataclass(frozen=True, slots=True)
class Delay:
    """A delay as it is given: in local steps, or in whole rounds with a restart at their end."""

    steps: int | None
    rounds: int

    def __str__(self) -> str:
        count, unit = (self.rounds, "round") if self.steps is None else (self.steps, "step")
        return f"{count} {unit}{'' if count == 1 else 's'}"


ONE_ROUND = Delay(None, 1)
"""That of CO2 as published."""
_TEXT = re.compile(r"(\d{1,18})\s*(steps?|rounds?)?")


def delay(text: str | Delay) -> Delay:
    """A delay from "3", "3 steps" or "1 round"; 0 is the same in both units.

    Raises OptionError.
    """
    if isinstance(text, Delay):
        return text
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"--delay is {text!r}; it must be a number of local steps, such as 3 or '3 steps', or"
            " of rounds, such as '1 round'"
        )
    count = int(match[1])
    if count == 0 or (match[2] or "").startswith("round"):
        return Delay(None, count)
    return Delay(count, 0)
