"""The strategies, and how to name one: `co2`, or with options `co2(tau=48, worker=node)`."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, ClassVar, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from co2sim.common import convert
from co2sim.common.errors import OptionError, nearest
from co2sim.schedule.mesh import MESH
from co2sim.schedule.schedule import DType, Layout, Schedule
from co2sim.strategies.co2 import CO2, PublishedCO2
from co2sim.strategies.diloco import DiLoCo
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.local import LocalSteps, Replica
from co2sim.strategies.local_sgd import LocalSGD, OverlapLocalSGD, SlowMo
from co2sim.strategies.zero import DDP, Zero1, Zero2, Zero3
from co2sim.strategies.zeropp import ZeroPP
from co2sim.training.memory import Items
from co2sim.training.workload import Workload

__all__ = [
    "STRATEGIES",
    "LocalSteps",
    "Strategy",
    "checked",
    "is_built_in",
    "option_range",
    "options_of",
    "parse",
    "says",
    "strategy_options",
    "with_options",
]


class Strategy(Protocol):
    """A strategy: it gives a schedule and memory as data, and executes nothing.

    It may say more about itself, see `says`:

    - `shares`: what its replicas share: nothing, (optimizer) states, parameters, or steps;
    - `divides_experts`: whether it combines with these; `offloads`: what it can have on hosts;
    - `divides_layers`, `has_stages`: whether a plan tries it with `tp` and `cp`, and with `pp`.
    """

    name: ClassVar[str]

    def schedule(self, job: Workload, layout: Layout) -> Schedule:
        """What every rank does in a round."""

    def memory(self, job: Workload, layout: Layout) -> Items:
        """Bytes that a rank keeps, by item, without activations."""


STRATEGIES: dict[str, type[Any]] = {
    kind.name: kind
    for kind in (
        *(DDP, Zero1, Zero2, Zero3, ZeroPP, FSDP),
        *(LocalSGD, OverlapLocalSGD, SlowMo, DiLoCo, CO2, PublishedCO2),
    )
}


_OF_THE_JOB = (*MESH, "lora", "quantize_base")
"""What combines with every strategy."""

_OPTIONS_ELSEWHERE = {
    "hsdp": "shard",
    **dict.fromkeys(("h", "H", "sync_every", "local_steps"), "tau"),
}
"""Options of other frameworks and papers, with our names."""

_STRATEGIES_ELSEWHERE = {
    "hsdp": "fsdp:shard=node",
    "dp": "ddp",
    "zero": "zero1, zero2 or zero3",
    "zero++": "zeropp",
    "localsgd": "local_sgd",
    **dict.fromkeys(("co2_published", "co2-published"), "co2.published"),
    **{f"zero-{stage}": f"zero{stage}" for stage in (1, 2, 3)},
}
"""Strategies of other frameworks and papers, as they are written here."""


def says(strategy: Strategy, name: str) -> Any:
    """What a strategy says about itself; None where it says nothing, as those of users may."""
    return getattr(strategy, name, None)


def is_built_in(strategy: Strategy) -> bool:
    """Whether it is one of `STRATEGIES`: of these a schedule follows from options and layout."""
    return type(strategy) in STRATEGIES.values()


def parse(text: str) -> Strategy:
    """Read a strategy: `co2`, `co2(tau=48, worker=node)` or `co2:tau=48,worker=node`.

    The last form needs no quotes in a shell.

    Raises OptionError for an unknown name or option, or a value that is not allowed.
    """
    name, _, options = text.strip().replace("(", ":", 1).partition(":")
    name = name.strip()
    if name.lower() in STRATEGIES:
        name = name.lower()
    if name not in STRATEGIES:
        ours = _STRATEGIES_ELSEWHERE.get(name.lower())
        meant = f"write {ours}" if ours else nearest(name, STRATEGIES)
        raise OptionError(f"unknown strategy {name!r}; {meant}")
    return _read(text, name, options, STRATEGIES[name])  # type: ignore[arg-type] # it can be hashed


@lru_cache(maxsize=1024)
def _read(text: str, name: str, options: str, kind: type[Strategy]) -> Strategy:
    """A strategy of a kind with its options, which a plan reads thousands of times."""
    if "(" in text:
        if not options.endswith(")"):
            raise OptionError(f"{text!r}: the parenthesis is not closed")
        options = options.removesuffix(")")
    pairs = [_pair(item, name) for item in options.split(",") if item.strip()]
    if len(dict(pairs)) < len(pairs):
        raise OptionError(f"{text!r} gives an option twice")
    return with_options(kind(), dict(pairs))


def _family(name: str) -> str:
    """What variants of a method have in common: "co2" of "co2.published"."""
    return name.partition(".")[0]


def _names(kind: type[Any]) -> list[str]:
    """The options of a strategy."""
    return [option.name for option in fields(kind)]


def options_of(strategy: Strategy) -> dict[str, str]:
    """The options of a strategy as texts, with the strategy that runs inside of a worker."""
    texts = {name: str(getattr(strategy, name)).lower() for name in _names(type(strategy))}
    if isinstance(strategy, LocalSteps) and strategy.worker != "gpu":
        texts["inner"] = Replica.of(strategy).inner.name  # type: ignore[union-attr]
    return texts


def with_options(strategy: Strategy, options: Mapping[str, str]) -> Strategy:
    """The strategy with some options changed, given as texts."""
    hints = _hints(type(strategy))
    names = _names(type(strategy))
    values = {}
    for option, text in options.items():
        if option not in names:
            allowed = nearest(_OPTIONS_ELSEWHERE.get(option, option), names)
            if option in _OF_THE_JOB:
                allowed = (
                    f"it is one of the job: --{option.replace('_', '-')}, or in Python {option}="
                )
            has_it = [
                kind.name
                for kind in STRATEGIES.values()
                if _family(kind.name) == _family(strategy.name) and option in _names(kind)
            ]
            if has_it:
                allowed = f"{has_it[0]} has it"
            raise OptionError(f"{strategy.name} has no option {option!r}; {allowed}")
        values[option] = _value(f"{strategy.name}: {option}", text, hints[option])
    return replace(strategy, **values)  # type: ignore[type-var]


def checked(strategy: Strategy) -> Strategy:
    """A strategy as an object, its options read as if they were texts: "bf16" is DType.BF16.

    Options of other types than numbers, truths and choices are left as they are. Raises OptionError
    for a value that is not allowed.
    """
    if not is_dataclass(strategy):
        return strategy
    values: dict[str, Any] = {}
    try:
        hints = _hints(type(strategy))
    except NameError:  # a type that is local to a function
        return strategy
    for option in (option.name for option in fields(strategy)):
        if not _is_plain(hints[option]):
            continue
        value = getattr(strategy, option)
        try:
            text = convert.text(value)
        except OptionError:  # an object
            text = convert.shown(value)
        converted = _value(f"{strategy.name}: {option}", text, hints[option])
        if (type(converted), converted) != (type(value), value):
            values[option] = converted
    return replace(strategy, **values) if values else strategy


_hints: Callable[[Any], Mapping[str, Any]] = lru_cache(64)(
    lambda made: MappingProxyType(get_type_hints(made))
)


def _is_plain(hint: Any) -> bool:
    """Whether values of this type can be written as a text that `_value` reads."""
    kinds = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
    plain = {int, float, bool, DType, type(None)}
    return all(get_origin(kind) is Literal or kind in plain for kind in kinds)


def _pair(item: str, name: str) -> tuple[str, str]:
    option, separator, value = item.partition("=")
    if not separator or not value.strip():
        raise OptionError(f"{name}: {item.strip()!r} is not option=value")
    return option.strip(), value.strip()


def strategy_options(made: type[Any]) -> list[tuple[str, str, str]]:
    """Every option of a strategy: its name, its default, and what is allowed."""
    hints = _hints(made)
    rows = []
    for option in fields(made):
        default = "none" if option.default is None else str(option.default).lower()
        rows.append((option.name, default, _allowed(hints[option.name])))
    return rows


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that an option may have."""
    return get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)


def _allowed(hint: Any) -> str:
    """What an option may be, as a text."""
    numbers = {int: "a whole number", float: "a number"}
    return ", ".join(
        [*(numbers[kind] for kind in _kinds(hint) if kind in numbers), *_choices(hint)]
    )


def option_range(made: type[Any], option: str) -> str:
    """What a strategy says that a number must be, when it is given -1: "1 to 10000"; else ""."""
    try:
        made(**{option: -1})
    except OptionError as error:
        return str(error).partition("; it must be ")[2]
    return ""


def _choices(hint: Any) -> dict[str, Any]:
    """The values of an option that it may have beside numbers, by their text."""
    choices: dict[str, Any] = {}
    for kind in _kinds(hint):
        if kind is NoneType:
            choices["none"] = None
        elif kind is DType:
            choices |= {str(dtype): dtype for dtype in DType}
        elif kind is bool:
            choices |= {"true": True, "false": False}
        else:
            choices |= {choice: choice for choice in get_args(kind)}
    return choices


def _value(what: str, text: str, hint: Any) -> Any:
    """Read an option's value as its annotated type."""
    text, choices = text.lower(), _choices(hint)
    if text in choices:
        return choices[text]
    reader = next((_READERS[kind] for kind in _kinds(hint) if kind in _READERS), None)
    if reader is None:
        raise OptionError(f"{what} is {text!r}; it is one of {', '.join(choices)}")
    try:
        return reader(what, text)
    except OptionError as error:
        others = "".join(f", or {choice}" for choice in choices)
        raise OptionError(f"{error}{others}") from None


_READERS = {int: convert.whole, float: convert.number}
