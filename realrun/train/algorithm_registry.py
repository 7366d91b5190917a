"""The local-update algorithms that can be trained: one entry each. Needs no torch.

A strategy says when to average (`co2:tau=12`). The options of the outer step say what is done with
the average: `momentum=0.5,lr=1.0,gap=gap_aware,clip=0.01`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from co2sim.common.errors import OptionError, nearest
from co2sim.common.validation import between, parse_number
from realrun import errors

_CHECKS: Mapping[str, Callable[[str, float], object]] = {
    "outer_momentum": errors.momentum,
    "outer_lr": errors.limit,
    "clip": errors.limit,
    "residual_decay": errors.momentum,
    "pull": errors.pull,
    "anchor_momentum": errors.momentum,
    "keep": partial(between, least=0, most=1),
    "penalty": partial(errors.penalty, gap="constant"),
}
"""Ranges of the arguments that are numbers; the other one is a gap."""

_STEP = {"momentum": "outer_momentum", "lr": "outer_lr"}
_CLIP = {"clip": "clip", "residual_decay": "residual_decay"}


@dataclass(frozen=True, slots=True)
class TrainableAlgorithm:
    """How a strategy is trained.

    `algorithm` is of `realrun.algorithms`. It takes `tau` and `dtype` of the strategy, the
    arguments that `passed` maps to other attributes of it, and those that `outer` maps the options
    of its outer step to.
    `refused` are options of the strategy that training does not have, each with the reason.
    """

    algorithm: str
    outer: Mapping[str, str] = field(default_factory=dict)
    passed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


LOCAL_UPDATES = {
    "local_sgd": TrainableAlgorithm("LocalSGD"),
    "overlap_local_sgd": TrainableAlgorithm(
        "OverlapLocalSGD", {"pull": "pull", "momentum": "anchor_momentum"}
    ),
    "slowmo": TrainableAlgorithm("SlowMo", _STEP),
    "diloco": TrainableAlgorithm(
        "DiLoCo",
        {**_STEP, "keep": "keep"},
        passed={"fragments": "fragments", "delay": "delay"},
        refused={"scale_block": "its blocks have their own size"},
    ),
    "co2": TrainableAlgorithm(
        "CO2",
        {**_STEP, **_CLIP},
        passed={"delay": "late"},
        refused={"average": "every rank averages its share"},
    ),
    "co2.published": TrainableAlgorithm(
        "CO2.published",
        {**_STEP, "gap": "gap", "penalty": "penalty", **_CLIP},
        passed={"staleness": "staleness"},
        refused={"average": "every rank averages its share"},
    ),
}
"""By strategy; those that are not here have no outer step."""


def pairs(_name: str, text: str) -> dict[str, str]:
    """Read "momentum=0.5,lr=1.0". Raises OptionError for what is no list of NAME=VALUE."""
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (part.strip() for part in item.partition("="))
        if not separator or not name or not value:
            raise OptionError(f"outer: {item!r} is not NAME=VALUE")
        if name in options:
            raise OptionError(f"outer: {name} is given twice")
        options[name] = value
    return options


def arguments(strategy: str, options: Mapping[str, str]) -> dict[str, Any]:
    """What the algorithm of this strategy takes. Raises OptionError for what it does not know."""
    if strategy not in LOCAL_UPDATES:
        if options:
            raise OptionError(f"{strategy} has no outer step: {next(iter(options))} does not apply")
        return {}
    allowed = LOCAL_UPDATES[strategy].outer
    values = {}
    for name, text in options.items():
        if name not in allowed:
            if not allowed:
                raise OptionError(f"{strategy} takes the plain mean: it has no {name!r}")
            raise OptionError(
                f"the outer step of {strategy} has no {name!r}; {nearest(name, allowed)}"
            )
        values[allowed[name]] = _value(name, text, allowed[name])
    if "penalty" in values:  # its range is right; does it apply?
        errors.penalty("outer: penalty", values["penalty"], values.get("gap", errors.DEFAULT_GAP))
    return values


def _value(name: str, text: str, argument: str) -> Any:
    if argument not in _CHECKS:
        errors.one_of(f"outer: {name}", text, errors.GAPS)
        return text
    amount = parse_number(f"outer: {name}", text)
    _CHECKS[argument](f"outer: {name}", amount)
    return amount
