"""The optimizers of a model, and what they must hold: one of them mostly, or several."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from co2sim.common.errors import OptionError
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
