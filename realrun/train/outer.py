"""The options of the outer step: numbers of a training that no schedule knows.

A strategy says when to average (`co2:tau=12`), these say what is done with the average:
`momentum=0.5,lr=1.0,gap=gap_aware,clip=0.01`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from co2sim.errors import OptionError, nearest
from co2sim.strategies import parse_number

GAPS = ("constant", "gap_aware")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: the argument of the algorithm that it becomes, and its range."""

    argument: str
    least: float = 0.0
    below: float = float("inf")
    above_least: bool = False
    choices: tuple[str, ...] = ()


_MOMENTUM = Option("outer_momentum", below=1.0)
_LR = Option("outer_lr", above_least=True)
OPTIONS: dict[str, dict[str, Option]] = {
    "local_sgd": {},
    "overlap_local_sgd": {
        "pull": Option("pull", below=1.0, above_least=True),
        "momentum": Option("anchor_momentum", below=1.0),
    },
    "slowmo": {"momentum": _MOMENTUM, "lr": _LR},
    "diloco": {"momentum": _MOMENTUM, "lr": _LR},
    "co2": {
        "momentum": _MOMENTUM,
        "lr": _LR,
        "gap": Option("gap", choices=GAPS),
        "penalty": Option("penalty", least=1.0),
        "clip": Option("clip", above_least=True),
    },
}
"""By strategy; those that are not here have no outer step."""


def pairs(text: str) -> dict[str, str]:
    """Read "momentum=0.5,lr=1.0". Raises OptionError for what is no list of NAME=VALUE."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or not name or not value:
            raise OptionError(f"outer: {item!r} is not NAME=VALUE")
        if name in found:
            raise OptionError(f"outer: {name} is given twice")
        found[name] = value
    return found


def arguments(strategy: str, given: Mapping[str, str]) -> dict[str, Any]:
    """What the algorithm of this strategy takes. Raises OptionError for what it does not know."""
    if strategy not in OPTIONS:
        if given:
            raise OptionError(f"{strategy} has no outer step: {next(iter(given))} does not apply")
        return {}
    known = OPTIONS[strategy]
    found = {}
    for name, text in given.items():
        if name not in known:
            if not known:
                raise OptionError(f"{strategy} takes the plain mean: it has no {name!r}")
            raise OptionError(
                f"the outer step of {strategy} has no {name!r}; {nearest(name, known)}"
            )
        found[known[name].argument] = _value(name, text, known[name])
    if found.get("gap") == "gap_aware" and "penalty" in found:
        raise OptionError("outer: penalty is that of gap=constant; gap_aware computes its own")
    return found


def _value(name: str, text: str, option: Option) -> Any:
    if option.choices:
        if text not in option.choices:
            raise OptionError(f"outer: {name} is {text!r}; {nearest(text, option.choices)}")
        return text
    number = parse_number(f"outer: {name}", text)
    low = number <= option.least if option.above_least else number < option.least
    if low or number >= option.below:
        least = f"{'above' if option.above_least else 'at least'} {option.least:g}"
        below = f" and below {option.below:g}" if option.below < float("inf") else ""
        raise OptionError(f"outer: {name} is {text}; it must be {least}{below}")
    return number
