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


@dataclass(frozen=True, slots=True)
class Option:
    """One option: the argument of the algorithm that it becomes, and the check of its range.

    Without a check it is one of `errors.GAPS`, else a number.
    """

    argument: str
    check: Callable[[str, float], object] | None = None


_MOMENTUM = Option("outer_momentum", errors.momentum)
_LR = Option("outer_lr", errors.limit)
_CLIP = {
    "clip": Option("clip", errors.limit),
    "residual_decay": Option("residual_decay", errors.momentum),
}


@dataclass(frozen=True, slots=True)
class TrainableAlgorithm:
    """How a strategy is trained.

    `algorithm` is of `realrun.algorithms`. It takes `tau` and `dtype` of the strategy, the
    arguments that `passed` maps to other attributes of it, and `outer`, the options of its outer
    step.
    `refused` are options of the strategy that training does not have, each with the reason.
    """

    algorithm: str
    outer: Mapping[str, Option] = field(default_factory=dict)
    passed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


LOCAL_UPDATES = {
    "local_sgd": TrainableAlgorithm("LocalSGD"),
    "overlap_local_sgd": TrainableAlgorithm(
        "OverlapLocalSGD",
        {
            "pull": Option("pull", errors.pull),
            "momentum": Option("anchor_momentum", errors.momentum),
        },
    ),
    "slowmo": TrainableAlgorithm("SlowMo", {"momentum": _MOMENTUM, "lr": _LR}),
    "diloco": TrainableAlgorithm(
        "DiLoCo",
        {
            "momentum": _MOMENTUM,
            "lr": _LR,
            "keep": Option("keep", partial(between, least=0, most=1)),
        },
        passed={"fragments": "fragments", "delay": "delay"},
        refused={"scale_block": "its blocks have their own size"},
    ),
    "co2": TrainableAlgorithm(
        "CO2",
        {"momentum": _MOMENTUM, "lr": _LR, **_CLIP},
        passed={"delay": "late"},
        refused={"average": "every rank averages its share"},
    ),
    "co2.published": TrainableAlgorithm(
        "CO2.published",
        {
            "momentum": _MOMENTUM,
            "lr": _LR,
            "gap": Option("gap"),
            "penalty": Option("penalty", partial(errors.penalty, gap="constant")),
            **_CLIP,
        },
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
        values[allowed[name].argument] = _value(name, text, allowed[name])
    if "penalty" in values:  # its range is right; does it apply?
        errors.penalty("outer: penalty", values["penalty"], values.get("gap", errors.DEFAULT_GAP))
    return values


def _value(name: str, text: str, option: Option) -> Any:
    if option.check is None:
        errors.one_of(f"outer: {name}", text, errors.GAPS)
        return text
    amount = parse_number(f"outer: {name}", text)
    option.check(f"outer: {name}", amount)
    return amount
