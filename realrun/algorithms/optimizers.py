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
from realrun.algorithms.flat_parameters import Masters, is_dense, is_plain, local_part, memory, some
from realrun.errors import warn_user

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]
"""One optimizer, or several that share out the parameters, such as Muon and AdamW."""

ATTACHED: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose steps an algorithm counts."""


def optimizers_of(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """The optimizers themselves, without what a library put around them. Raises OptionError."""
    bare = tuple(
        _inside(wrapper)
        for wrapper in (optimizers if isinstance(optimizers, list | tuple) else (optimizers,))
    )
    if not bare:
        raise OptionError("optimizer is an empty list; give one optimizer at least")
    if len(set(bare)) < len(bare):
        raise OptionError("an optimizer is there twice")
    if any(optimizer in ATTACHED for optimizer in bare):
        raise OptionError(
            "the optimizer already closes rounds for another algorithm; close that one first"
        )
    return bare


def _inside(wrapper: object) -> Optimizer:
    """An optimizer, or the one that a wrapper of Accelerate or Lightning has as `optimizer`."""
    while (inner := getattr(wrapper, "optimizer", None)) is not None:
        wrapper = inner
    if not isinstance(wrapper, Optimizer):
        raise OptionError(f"optimizer is a {type(wrapper).__name__}, not a torch.optim.Optimizer")
    if not hasattr(wrapper, "_optimizer_step_pre_hooks"):
        raise OptionError(
            f"optimizer is a {type(wrapper).__name__}, which does not call the step hooks of torch"
            " that count steps: give the optimizer inside it; averaging is done here"
        )
    return wrapper


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
    each = [id(tensor) for tensor in held(optimizers)]
    named = list(model.named_parameters())
    if masters:
        each = _with_masters(each, held(optimizers), [tensor for _, tensor in named], masters)
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
    of_memory = {memory_place(tensor): id(tensor) for tensor in tensors}
    pairs = [(id(param), master) for param in parameters if (master := masters(param)) is not None]
    stand_in = {of_memory.get(memory_place(master)) for _, master in pairs} - {None}
    identities = {id(param) for param in parameters}
    kept = [key for key in each if key in identities or key not in stand_in]
    return kept + [
        key for key, master in pairs if key not in kept and memory_place(master) in of_memory
    ]


def memory_place(tensor: Tensor) -> int:
    """The memory that a tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def held(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """The parameters of all optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def refuse_changed(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    parameters: Sequence[tuple[str, Tensor]],
    trained: set[int],
    algorithm: str,
) -> None:
    """Raise OptionError where other parameters are trained now than averaged, or other tensors."""
    for param in held(optimizers):
        if param.requires_grad and id(param) not in trained:
            raise OptionError(
                f"the optimizer trains a parameter of shape {tuple(param.shape)} that was frozen,"
                f" or not there, when averaging began: train it from the start (at a rate of 0), or"
                f" end before with finish() and make a new {algorithm}; in Lightning and"
                " Transformers, with a second fit() or train()"
            )
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
    names = {
        optimizer: f"optimizer {index} ({type(optimizer).__name__})"
        for index, optimizer in enumerate(optimizers)
    }
    idle = next(optimizer for optimizer in optimizers if optimizer not in stepped)
    warn_user(
        f"{names[busy]} has taken {stepped[busy]} steps since {names[idle]} took its last: a local"
        " step is over when each has taken one, so that no round ends and nothing is averaged"
        " meanwhile"
    )


def count_nonfinite(optimizers: Sequence[Optimizer]) -> int:
    """How many tensors of the optimizers' states hold a NaN or an infinity."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return sum(
        not bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point()
    )


def rates(optimizers: Sequence[Optimizer]) -> list[float]:
    """The learning rates, as they are now."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
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


def masters_of(option: MasterWeights | None, optimizers: Sequence[Optimizer]) -> Masters | None:
    """What gives the master weights of a parameter. Raises OptionError."""
    if option is None:
        return None
    if isinstance(option, str) and option:
        return partial(_named, option, optimizers)
    if isinstance(option, str) or not callable(option):
        raise OptionError(
            f"master_weights is {option!r}; it must name a state or an attribute of the optimizer,"
            " such as 'master_param', or be a function of a parameter"
        )
    return partial(_asked, option)


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
            index_of = {id(param): index for index, param in enumerate(held([optimizer]))}
            tensors = list(_tensors(copies))
            if id(parameter) in index_of and index_of[id(parameter)] < len(tensors):
                return _floating(name, tensors[index_of[id(parameter)]])
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
            torch.equal(_flat(copy, param).to(param.dtype), _flat(param, param).to(param.dtype))
            for param, copy in self.pairs
        )

    @property
    def go_back(self) -> bool:
        """Whether steps return to these: masters, and by their names slow weights.

        What only remembers, such as a moving average or the first weights, is harmless.
        """
        if self.name in _MEANS:
            return False
        return self.exact or self.name == "z" or any(word in self.name for word in _SLOW)


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
                values = [some(_flat(copy, param)) for param, copy in copies.pairs]
                again = all(map(torch.equal, values, published))
                followed = copies.exact and _apart(values, published) < _apart(values, before)
                if not again and not followed and copies.go_back:
                    _refuse(copies)
            self._found, self._published = [], None
        if look:
            trained = {id(each) for _, each in self._parameters}
            there = {(copies.optimizer, copies.name) for copies in self._found}
            near = [
                copies for optimizer in self._optimizers for copies in _near(optimizer, trained)
            ]
            self._found += [
                copies for copies in near if (copies.optimizer, copies.name) not in there
            ]
        self._before = self._now()

    @torch.no_grad()
    def averaged(self) -> None:
        """What comes after a local step was done; it may have been an average."""
        now = self._now()
        if any(not all(map(torch.equal, *pair)) for pair in zip(now, self._before, strict=True)):
            self._published, self._left_behind = now, self._before

    def _now(self) -> list[list[Tensor]]:
        """Some elements of the parameters that have copies."""
        return [
            [some(_flat(param, param)).clone() for param, _ in each.pairs] for each in self._found
        ]


def _near(optimizer: Optimizer, trained: set[int]) -> Iterator[_Copies]:
    """What an optimizer keeps that is its parameters, or near them."""
    by_name: dict[str, list[tuple[Tensor, Tensor]]] = {}
    parameters = [param for param in held([optimizer]) if id(param) in trained]
    for name, param, value in (*_of_each(optimizer, parameters), *_of_all(optimizer, parameters)):
        if param.dim() and _is_alike(value, param):
            by_name.setdefault(name, []).append((param, value))
    for name, pairs in by_name.items():
        if _follows(pairs):
            yield _Copies(optimizer, name, pairs)


def _of_each(
    optimizer: Optimizer, parameters: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor, Any]]:
    """The state of every parameter, and its attributes, such as Megatron's `main_param`."""
    for param in parameters:
        state = optimizer.state.get(param)
        for name, value in state.items() if isinstance(state, Mapping) else ():
            yield str(name), param, value
        for name, value in vars(param).items():
            if name not in {"grad", "_grad"}:
                yield name, param, value


def _of_all(
    optimizer: Optimizer, parameters: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor, Any]]:
    """Lists and dicts with a tensor for every parameter, of the optimizer and of its groups."""
    groups = [(group["params"], group) for group in optimizer.param_groups]
    for params, values in ((parameters, vars(optimizer)), *groups):
        for name, value in values.items():
            if name not in {"state", "param_groups", "defaults", "params"}:
                tensors = list(_tensors(value))
                if len(tensors) == len(params):
                    yield from ((name, *pair) for pair in zip(params, tensors, strict=True))


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
    apart = _apart(
        [_flat(copy, param) for param, copy in pairs], [_flat(param, param) for param, _ in pairs]
    )
    size = sum(float(_flat(param, param).square().sum()) for param, _ in pairs)
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
        and local_part(value).shape == local_part(parameter).shape
    )


def _tensors(value: Any, depth: int = _DEEP) -> Iterator[Tensor]:
    """The tensors in lists, and in the groups of parameters, of an attribute."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple) and depth:
        for element in value:
            yield from _tensors(element, depth - 1)
    elif isinstance(value, dict) and depth:
        for element in value.values():
            yield from _tensors(element, depth - 1)


def _apart(values: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The square of the distance."""
    return sum(float((a - b).square().sum()) for a, b in zip(values, other, strict=True))


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
    return local_part(tensor).reshape(-1).to(parameter.device, torch.float32)
