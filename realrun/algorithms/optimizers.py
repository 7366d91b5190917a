"""The optimizers of a model: what they must hold, and state that holds the parameters once more.

Such state is put back at the next step, so that an average that only the model gets is undone:
master weights in fp32 (Transformer Engine, Apex, Megatron, DeepSpeed), the slow weights of
Lookahead, or the z of Schedule-Free.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from co2sim.common.errors import OptionError
from realrun.algorithms.flat_parameters import Masters, is_dense, is_plain, memory, some
from realrun.errors import warn_user

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
"""One optimizer, or several that share out the parameters, such as Muon and AdamW."""

ATTACHED: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose steps an algorithm counts."""


def optimizers_of(given: Optimizers) -> tuple[Optimizer, ...]:
    """The optimizers themselves, without what a library put around them. Raises OptionError."""
    found = tuple(_inside(one) for one in (given if isinstance(given, list | tuple) else (given,)))
    if not found:
        raise OptionError("optimizer is an empty list; give one optimizer at least")
    if len(set(found)) < len(found):
        raise OptionError("an optimizer is there twice")
    if any(one in ATTACHED for one in found):
        raise OptionError(
            "the optimizer already closes rounds for another algorithm; close that one first"
        )
    return found


def _inside(given: object) -> Optimizer:
    """An optimizer, or the one that a wrapper of Accelerate or Lightning has as `optimizer`."""
    while (inner := getattr(given, "optimizer", None)) is not None:
        given = inner
    if not isinstance(given, Optimizer):
        raise OptionError(f"optimizer is a {type(given).__name__}, not a torch.optim.Optimizer")
    if not hasattr(given, "_optimizer_step_pre_hooks"):
        raise OptionError(
            f"optimizer is a {type(given).__name__}, which does not call the step hooks of torch"
            " that count steps: give the optimizer inside it; averaging is done here"
        )
    return given


def trainable(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    masters: Callable[[Tensor], Tensor | None] | None = None,
) -> list[tuple[str, Tensor]]:
    """Names and parameters to average. Raises OptionError unless the optimizers hold just them.

    One may hold `masters` of a parameter instead of the parameter.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    which = "the optimizer does not" if len(optimizers) == 1 else "none of the optimizers does"
    each = [id(one) for one in held(optimizers)]
    named = list(model.named_parameters())
    if masters:
        each = _with_masters(each, held(optimizers), [one for _, one in named], masters)
    for name, parameter in named:
        if parameter.requires_grad and id(parameter) not in each:
            raise OptionError(
                f"{which} hold {name!r}, which is trainable: add it, or set its requires_grad to"
                " False before"
            )
        if each.count(id(parameter)) > 1:
            raise OptionError(f"two optimizers hold {name!r}; one must, and no other")
    if set(each) - {id(parameter) for _, parameter in named}:
        raise OptionError("the optimizer holds parameters that are not the model's")
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


def _with_masters(
    each: list[int],
    tensors: Sequence[Tensor],
    parameters: Sequence[Tensor],
    masters: Callable[[Tensor], Tensor | None],
) -> list[int]:
    """The tensors of optimizers, by identity: parameters in the place of their masters.

    Masters may be parts of one flat tensor.
    """
    of_memory = {memory_place(one): id(one) for one in tensors}
    found = [(id(one), master) for one in parameters if (master := masters(one)) is not None]
    stand_in = {of_memory.get(memory_place(master)) for _, master in found} - {None}
    known = {id(one) for one in parameters}
    kept = [one for one in each if one in known or one not in stand_in]
    return kept + [
        one for one, master in found if one not in kept and memory_place(master) in of_memory
    ]


def memory_place(tensor: Tensor) -> int:
    """The memory that a tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def held(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The parameters of all optimizers."""
    groups = [group for one in optimizers for group in one.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def refuse_others(optimizers: Sequence[Optimizer], trained: set[int], algorithm: str) -> None:
    """Raise OptionError for parameters that are trained now, but not averaged."""
    for one in held(optimizers):
        if one.requires_grad and id(one) not in trained:
            raise OptionError(
                f"the optimizer trains a parameter of shape {tuple(one.shape)} that was frozen,"
                f" or not there, when averaging began: train it from the start (at a rate of 0), or"
                f" end before with finish() and make a new {algorithm}; in Lightning and"
                " Transformers, with a second fit() or train()"
            )


def refuse_replaced(model: nn.Module, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise OptionError where the model has other tensors than those that are trained."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return  # whose parameters are others while they are gathered
    now = dict(model.named_parameters())
    for name, parameter in parameters:
        if now.get(name) is not parameter:
            raise OptionError(
                f"{name!r} of the model is another tensor than when averaging began, as after"
                " load_state_dict(assign=True): the optimizer does not train it; load before you"
                " make the optimizer and the algorithm, or without assign"
            )


def say_idle(
    optimizers: Sequence[Optimizer], stepped: Mapping[Optimizer, int], busy: Optimizer
) -> None:
    """Warn of optimizers that take no step while another one has taken those of a round."""
    names = {one: f"optimizer {at} ({type(one).__name__})" for at, one in enumerate(optimizers)}
    idle = next(one for one in optimizers if one not in stepped)
    warn_user(
        f"{names[busy]} has taken {stepped[busy]} steps since {names[idle]} took its last: a local"
        " step is over when each has taken one, so that no round ends and nothing is averaged"
        " meanwhile"
    )


def count_nonfinite(optimizers: Sequence[Optimizer]) -> int:
    """How many tensors of the optimizers' states hold a NaN or an infinity."""
    states = [state for one in optimizers for state in one.state.values()]
    tensors = [one for state in states for one in state.values() if isinstance(one, Tensor)]
    return sum(not bool(one.isfinite().all()) for one in tensors if one.is_floating_point())


def rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """The learning rates, as they are now."""
    groups = [group for one in optimizers for group in one.param_groups]
    return [float(group["lr"]) for group in groups if "lr" in group]


MasterWeights: TypeAlias = str | Callable[[Tensor], Tensor | None]
"""The key of the state, or the attribute of the optimizer, or what gives those of a parameter."""

_NEAR = 0.1
"""How far a copy may be from the parameters, relatively: slow weights are one step behind."""
_SLOW = ("slow", "lookahead", "cached")
"""In the names of slow weights: timm, pytorch-optimizer, torch-optimizer."""
_MEANS = ("ax",)
"""Names of means that equal the parameters at first, and that no step reads: ASGD of torch."""
_DEEP = 4
"""Lists in lists that an attribute of an optimizer may be."""


def masters_of(given: MasterWeights | None, optimizers: Sequence[Optimizer]) -> Masters | None:
    """What gives the master weights of a parameter. Raises OptionError."""
    if given is None:
        return None
    if isinstance(given, str) and given:
        return partial(_named, given, optimizers)
    if isinstance(given, str) or not callable(given):
        raise OptionError(
            f"master_weights is {given!r}; it must name a state or an attribute of the optimizer,"
            " such as 'master_param', or be a function of a parameter"
        )
    return partial(_asked, given)


def _asked(function: Callable[[Tensor], Tensor | None], parameter: Tensor) -> Tensor | None:
    """What a function gives; None for a parameter that it does not know."""
    try:
        master = function(parameter)
    except (AttributeError, KeyError):
        return None
    if isinstance(master, Tensor) and not is_plain(master):
        _floating("what the function gives", master)
    return master


def _named(name: str, optimizers: Sequence[Optimizer], parameter: Tensor) -> Tensor | None:
    """What an optimizer keeps of a parameter by a name, in its state or as an attribute."""
    for optimizer in optimizers:
        state = optimizer.state.get(parameter)
        if state and isinstance(state.get(name), Tensor):
            return _floating(name, state[name])
        if (copies := getattr(optimizer, name, None)) is not None:
            own = {id(one): place for place, one in enumerate(held([optimizer]))}
            tensors = list(_tensors(copies))
            if id(parameter) in own and own[id(parameter)] < len(tensors):
                return _floating(name, tensors[own[id(parameter)]])
    return None


def refuse_missing(masters: Masters, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise OptionError where a step was taken, and a parameter has no master weights."""
    for name, parameter in parameters:
        if masters(parameter) is None and parameter.dtype != torch.float32:
            raise OptionError(
                f"master_weights: after a step of the optimizer {name!r} has none; leave the option"
                " out where the optimizer keeps none"
            )


@torch.no_grad()
def refuse_unlike(masters: Masters, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Raise OptionError for what is no master of its parameter; before the second step."""
    for name, parameter in parameters:
        master, again = masters(parameter), masters(parameter)
        if master is None or again is None:
            continue
        if not _is_master(master, again, parameter):
            raise OptionError(
                f"master_weights: what it gives for {name!r} is not its master: the same fp32"
                " tensor at every call, whose values are those of the parameter, but for rounding"
            )


@dataclass(frozen=True)
class _Copies:
    """State of an optimizer that is near its parameters: each with its copy."""

    optimizer: Optimizer
    name: str
    pairs: Sequence[tuple[Tensor, Tensor]]

    @property
    def exact(self) -> bool:
        """Whether the parameters are these, but for rounding."""
        return all(
            torch.equal(_flat(copy, one).to(one.dtype), _flat(one, one).to(one.dtype))
            for one, copy in self.pairs
        )

    @property
    def go_back(self) -> bool:
        """Whether steps return to these: masters, and by their names slow weights.

        What only remembers, such as a moving average or the first weights, is harmless.
        """
        if self.name in _MEANS:
            return False
        return self.exact or self.name == "z" or any(one in self.name for one in _SLOW)


class CopyWatch:
    """Refuses state that holds the parameters once more, and does not follow an average.

    Copies are looked for after the first step. After the first average that moves the model, and
    the step behind it, one that was copied from the model again, as SAM's, holds what the average
    gave; one that follows the model, as the mean of ASGD does at first, is nearer to that than to
    what the model was before. Any other holds what the next steps would go back to.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], parameters: Sequence[tuple[str, Tensor]]
    ) -> None:
        self._optimizers, self._parameters = optimizers, parameters
        self._found: list[_Copies] = []
        self._before: list[list[Tensor]] = []
        self._left_behind: list[list[Tensor]] = []
        self._published: list[list[Tensor]] | None = None

    @property
    def found(self) -> bool:
        """Whether there are copies that have not been judged."""
        return bool(self._found)

    @torch.no_grad()
    def stepped(self, *, look: bool) -> None:
        """A local step was taken, and nothing was averaged since. Raises OptionError."""
        if self._published is not None:
            for copies, before, published in zip(
                self._found, self._left_behind, self._published, strict=True
            ):
                own = [some(_flat(copy, one)) for one, copy in copies.pairs]
                again = all(map(torch.equal, own, published))
                followed = copies.exact and _apart(own, published) < _apart(own, before)
                if not again and not followed and copies.go_back:
                    _refuse(copies)
            self._found, self._published = [], None
        if look:
            known = {id(each) for _, each in self._parameters}
            there = {(one.optimizer, one.name) for one in self._found}
            near = [copies for one in self._optimizers for copies in _near(one, known)]
            self._found += [one for one in near if (one.optimizer, one.name) not in there]
        self._before = self._now()

    @torch.no_grad()
    def averaged(self) -> None:
        """What comes after a local step was done; it may have been an average."""
        now = self._now()
        if any(not all(map(torch.equal, *pair)) for pair in zip(now, self._before, strict=True)):
            self._published, self._left_behind = now, self._before

    def _now(self) -> list[list[Tensor]]:
        """Some elements of the parameters that have copies."""
        return [[some(_flat(one, one)).clone() for one, _ in each.pairs] for each in self._found]


def _near(optimizer: Optimizer, known: set[int]) -> Iterator[_Copies]:
    """What an optimizer keeps that is its parameters, or near them."""
    by_name: dict[str, list[tuple[Tensor, Tensor]]] = {}
    own = [one for one in held([optimizer]) if id(one) in known]
    for name, one, value in (*_of_each(optimizer, own), *_of_all(optimizer, own)):
        if one.dim() and _is_alike(value, one):
            by_name.setdefault(name, []).append((one, value))
    for name, pairs in by_name.items():
        if _follows(pairs):
            yield _Copies(optimizer, name, pairs)


def _of_each(optimizer: Optimizer, own: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Any]]:
    """The state of every parameter, and its attributes, such as Megatron's `main_param`."""
    for one in own:
        state = optimizer.state.get(one)
        for name, value in state.items() if isinstance(state, Mapping) else ():
            yield str(name), one, value
        for name, value in vars(one).items():
            if name not in {"grad", "_grad"}:
                yield name, one, value


def _of_all(optimizer: Optimizer, own: Sequence[Tensor]) -> Iterator[tuple[str, Tensor, Any]]:
    """Lists and dicts with a tensor for every parameter, of the optimizer and of its groups."""
    for name, value in vars(optimizer).items():
        tensors = list(_tensors(value)) if name not in {"state", "param_groups", "defaults"} else []
        if len(tensors) == len(own):
            yield from ((name, *pair) for pair in zip(own, tensors, strict=True))
    for group in optimizer.param_groups:
        for name, value in group.items():
            tensors = list(_tensors(value)) if name != "params" else []
            if len(tensors) == len(group["params"]):
                yield from ((name, *pair) for pair in zip(group["params"], tensors, strict=True))


def _refuse(copies: _Copies) -> None:
    name, pairs = copies.name, copies.pairs
    exact = copies.exact
    raise OptionError(
        f"{name!r} of {type(copies.optimizer).__name__} holds the parameters once more, so that its"
        " steps undo every average; "
        + (
            f"give master_weights={name!r}, so that it is averaged, too"
            if exact and pairs[0][1].dtype == torch.float32
            else "take an optimizer without it: local updates do the same"
        )
    )


def _follows(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether copies are the parameters, or near them."""
    apart = _apart([_flat(copy, one) for one, copy in pairs], [_flat(one, one) for one, _ in pairs])
    size = sum(float(_flat(one, one).square().sum()) for one, _ in pairs)
    return size > 0 and apart <= _NEAR**2 * size


def _is_alike(value: Any, parameter: Tensor) -> bool:
    """Whether something may be a copy of a parameter, but is not that itself.

    What keeps its elements elsewhere, as quantized state does, or is sparse, is not looked at.
    """
    if not isinstance(value, Tensor) or value is parameter or not is_plain(value):
        return False
    if isinstance(value, DTensor) != isinstance(parameter, DTensor):
        return False
    return (
        value.is_floating_point()
        and value.shape == parameter.shape
        and _local(value).shape == _local(parameter).shape
    )


def _tensors(value: Any, depth: int = _DEEP) -> Iterator[Tensor]:
    """The tensors in lists, and in the groups of parameters, of an attribute."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple) and depth:
        for one in value:
            yield from _tensors(one, depth - 1)
    elif isinstance(value, dict) and depth:
        for one in value.values():
            yield from _tensors(one, depth - 1)


def _apart(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The square of the distance."""
    return sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))


def _floating(name: str, value: Tensor) -> Tensor:
    if value.dtype != torch.float32 or not is_plain(value):
        what = value.dtype if is_plain(value) else f"a {type(value).__name__}, {value.layout}"
        raise OptionError(f"master_weights: {name!r} is {what}; it must be a dense float32 tensor")
    return value


def _is_master(master: Tensor, again: Tensor, parameter: Tensor) -> bool:
    """Whether it is the same fp32 tensor at each call, with the values of the parameter."""
    if master.dtype != torch.float32 or not is_dense(master):
        return False
    if master.numel() != parameter.numel() or memory(master).data_ptr() != memory(again).data_ptr():
        return False
    return bool((memory(master).to(parameter) == memory(parameter)).all())


def _flat(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The elements that this rank holds, in their logical order, where the parameter is."""
    return _local(tensor).reshape(-1).to(parameter.device, torch.float32)


def _local(tensor: Tensor) -> Tensor:
    held = tensor.detach()
    return held.to_local() if isinstance(held, DTensor) else held
