"""Which steps of optimizers are local steps, and whether something else moves the model.

A step is counted where the outermost hooked `step` of an optimizer ends: one that calls
`super().step()` has hooks at both, and one that holds another optimizer (SAM) may step only that.
What moves the model without a counted step would be lost at the end of a round, or at `finish`.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from inspect import iscode
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from co2sim.common.errors import OptionError
from realrun.algorithms.flat_parameters import memory, some
from realrun.algorithms.optimizers import held
from realrun.errors import warn_user

_WATCHED = 4
"""Parameters of which some elements are watched."""
_HOOKED = 16
"""Parameters that tell of a backward pass: some may be frozen, or not used."""
_LARGE = 4.0
"""Steps of one local step's size: what moves further without one is no small correction."""
_AVERAGES = 5
"""Rounds in which steps behind averages are looked at: the first ones move a model most."""
_LONG_ROUND = 4
"""Steps."""
_BACK = (0.8, 1.6)
"""Of what averages change: as much is taken back by no training that learns from other workers."""
_ALIKE = 0.5
"""The square of the cosine between steps back and averages: steps may be longer than these."""
_MIN_CHANGES = 20
"""Changes without a step that are waited for, at least."""
_WRAPPERS = [
    constant for constant in Optimizer.profile_hook_step.__code__.co_consts if iscode(constant)
]
"""The code of what torch puts around `step` to call its hooks."""


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers that it holds, of the same parameters: SAM has one that takes the steps."""
    parameters = {id(param) for param in held([optimizer])}
    candidates = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    return [inner for inner in candidates if {id(each) for each in held([inner])} <= parameters]


class StepHooks:
    """The hooks of optimizers: `before` every step, and `after` those that are local steps."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        before: Callable[[], None],
        after: Callable[[Optimizer], None],
        watch: "ModelWatch",
    ) -> None:
        self._outer = {
            inner: optimizer for optimizer in optimizers for inner in inner_optimizers(optimizer)
        }
        self._inside: set[Optimizer] = set()
        self._before, self._after, self._watch = before, after, watch
        self.all = (*optimizers, *self._outer)
        # A compiled step calls the hooks as they are: what they do with other ranks is no graph.
        pre, post = map(torch.compiler.disable, (self._pre, self._post))
        self._handles: list[RemovableHandle] = []
        for hooked in self.all:
            self._handles.append(hooked.register_step_pre_hook(pre))
            self._handles.append(hooked.register_step_post_hook(post))

    def remove(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _pre(self, optimizer: Optimizer, *_: object) -> None:
        self._watch.begin_step()
        if held([optimizer])[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise OptionError(
                "a CUDA graph is captured, which replays the step but not what comes after it, such"
                " as averages: capture forward and backward only, and call step() outside"
            )
        self._before()

    def _post(self, optimizer: Optimizer, *_: object) -> None:
        if sum(1 for _ in islice(self._running(), 2)) > 1:
            return  # within another step, which counts
        self._watch.stepped()
        outer = self._outer.get(optimizer, optimizer)
        if outer is not optimizer:
            self._inside.add(optimizer)
            if any(inner not in self._inside for inner, of in self._outer.items() if of is outer):
                return
            self._inside -= {inner for inner, of in self._outer.items() if of is outer}
        self._after(outer)

    def _running(self) -> Iterator[Optimizer]:
        """Those of the optimizers in whose hooked `step` this is called, the innermost first."""
        frame = sys._getframe(1)  # noqa: SLF001 - an exception leaves no frame, but a flag
        while frame is not None:
            if frame.f_code in _WRAPPERS:
                optimizer = frame.f_locals.get("self") or frame.f_locals["args"][0]
                if optimizer in self.all:
                    yield optimizer
            frame = frame.f_back  # type: ignore[assignment]


class PullWatch:
    """Says once where steps go back to what the model was before an average.

    With d how far averages moved some elements, and s the steps behind them: s is about
    - (1 + 1 / tau) d where something unknown holds the parameters once more, and at most about
    - d / tau where steps continue as before. In short rounds the two cannot be distinguished.
    """

    def __init__(self, now: Callable[[], Tensor], tau: int) -> None:
        self._now, self._left = now, _AVERAGES if tau >= _LONG_ROUND else 0
        self._before: Tensor | None = None
        self._after = self._moved = torch.zeros(0, device="cpu")
        self._sums: Tensor | None = None

    @property
    def looks(self) -> bool:
        """Whether it has not seen enough yet."""
        return self._left > 0

    @torch.no_grad()
    def stepped(self) -> None:
        """A local step was taken, and nothing was averaged since."""
        self._before = self._now()
        if len(self._moved):
            step, moved = self._before - self._after, self._moved
            sums = torch.stack([-(step @ moved), moved @ moved, step @ step])
            self._sums = sums if self._sums is None else self._sums + sums

    @torch.no_grad()
    def averaged(self, *, last: bool) -> None:
        """What comes after a step was done; `last` of a round."""
        if self._before is None:
            return
        self._after = self._now()
        self._moved = self._after - self._before
        if not last:
            return
        self._left -= 1
        if self._left or self._sums is None:
            return
        back, moved, steps = self._sums.tolist()
        if _BACK[0] * moved < back < _BACK[1] * moved and back**2 > _ALIKE * moved * steps:
            warn_user(
                f"steps take back {100 * back / moved:.0f} % of what averages change: an optimizer"
                " keeps the parameters once more (name these by master_weights=), or workers come"
                " to their own optimum within a round (take shorter rounds)"
            )


class ForwardWatch:
    """Measures what the forward pass of a model changes in its parameters, such as with `max_norm`.

    That is a part of the local step that follows. `changes` counts changes in place, `moved` is how
    far the watched elements went. A compiled or captured pass is not seen from inside.
    """

    def __init__(
        self,
        model: nn.Module,
        versions: Callable[[], int],
        now: Callable[[], Tensor],
        before: Callable[[], bool],
    ) -> None:
        """`before` is called before a pass; it gives whether the pass is to be measured."""
        self._versions, self._now, self._before = versions, now, before
        self.changes, self.moved = 0, torch.zeros_like(now())
        self._entered: nn.Module | None = None
        self._version, self._held = 0, self.moved
        self._modules = list(_entrances(model))
        self._handles: list[RemovableHandle] = []
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def __deepcopy__(self, memo: object) -> "ForwardWatch":
        """Hooks of a copied module do nothing: `_enter` knows the modules that are watched."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A saved module does without."""
        return _Unwatched, ()

    def remove(self) -> None:
        """Let go of the modules."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling() or self._is_elsewhere(module):
            return
        if self._entered not in {None, module}:
            return
        self._entered = None
        if self._before():
            self._entered = module
            self._version, self._held = self._versions(), self._now()

    def _leave(self, module: nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling() or module is not self._entered:
            return
        self._entered = None
        self.changes += self._versions() - self._version
        self.moved += (self._now() - self._held).nan_to_num(0, 0, 0)

    def _is_elsewhere(self, module: nn.Module) -> bool:
        capturing = self.moved.is_cuda and torch.cuda.is_current_stream_capturing()
        capturing |= torch._C._get_tracing_state() is not None  # noqa: SLF001 - as torch.jit asks
        return capturing or not any(watched is module for watched in self._modules)


class _Unwatched:
    """The hooks of a module that was saved while it was watched."""

    def _enter(self, *_: object) -> None:
        pass

    _leave = _enter


def _entrances(model: nn.Module) -> Iterator[nn.Module]:
    """Modules whose call is a forward pass: the model, or those in a container without `forward`.

    Embeddings that scale their weights are called alone in some models. FSDP2 is left out, whose
    parameters are others in a pass.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, nn.ModuleDict | nn.ModuleList):
            waiting += module.children()
        else:
            yield module
            inside = (each for each in module.modules() if each is not module)
            yield from (each for each in inside if getattr(each, "max_norm", None) is not None)


class ModelWatch:
    """Notices that the model moves though no local step is counted.

    It counts how often the parameters were changed in place between two backward passes, without a
    hooked step, and looks at some elements: those of the last counted step, and those of now. What
    the forward pass changes is left out.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[tuple[str, Tensor]],
        tau: int,
        before_forward: Callable[[], bool],
    ) -> None:
        """`before_forward`: see ForwardWatch."""
        self._parameters = [param for _, param in parameters]
        chosen = [pair for pair in parameters if memory(pair[1]).numel()]
        self._watched = chosen[:: max(1, -(-len(chosen) // _WATCHED))]
        self._names = [name for name, param in self._watched for _ in some(memory(param))]
        self._limit = max(_MIN_CHANGES, 4 * tau)
        self._passes, self._changes, self._version = 0, 0, -1
        self._counted = self.stepping = False
        self._by_hand = torch.zeros((), dtype=torch.float64, device="cpu")
        """The largest change by hand before a step."""
        self._seen: deque[Tensor] = deque(maxlen=2)
        every = [param for param in self._parameters if not isinstance(param, DTensor)]
        hooked = {
            id(param): param for param in (*every[:: max(1, len(every) // _HOOKED)], *every[-2:])
        }
        self._fired: set[int] = set()
        self._handles = [
            param.register_post_accumulate_grad_hook(torch.compiler.disable(self._passed))  # type: ignore[no-untyped-call]
            for param in hooked.values()
        ]
        self.forward = ForwardWatch(model, self._versions, self._now, before_forward)
        self.mark(counted=False)
        self._first = self._versions()
        self.pull = PullWatch(self._now, tau)

    def remove(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()
        self.forward.remove()

    def stepped(self) -> None:
        """A hooked step has ended, counted or not."""
        self.stepping = False
        self._passes = self._changes = 0

    @torch.no_grad()
    def begin_step(self) -> None:
        """What was changed by hand since the last step, such as a clamp, is part of this one."""
        if self._counted and self._seen and not self.stepping:
            changed = (self._outside() - self._seen[-1]).abs().max()
            self._by_hand = torch.maximum(self._by_hand, changed.to(self._by_hand))
        self.stepping = True

    @torch.no_grad()
    def mark(self, *, counted: bool = True) -> None:
        """What the model holds now is as it should be: after a local step, or as it was loaded."""
        if not counted:
            self._seen.clear()
        self._counted |= counted
        self._passes = self._changes = 0
        self._seen.append(self._outside())

    def loaded(self) -> bool:
        """Whether parameters were written since this was made."""
        return self._versions() != self._first

    def total(self) -> float:
        """The sum of the watched elements, to tell one model from another."""
        return float(self._now().double().sum())

    def forget(self) -> None:
        """A saved state was loaded, and weights may be: begin with what the first pass finds."""
        self._counted = False
        self._passes = self._changes = 0
        self._seen.clear()

    @torch.no_grad()
    def lost(self, *, at_the_end: bool = False) -> str:
        """What has moved without a counted step, and would be lost; or nothing.

        A model may be changed after a step, such as clamped. That is taken for progress, unless it
        changes from one backward pass to the next, or has moved farther `at_the_end` than it did
        between steps. Weights that were loaded before the first step are lost only then.
        """
        if not self._seen:
            return ""
        now, last = self._outside(), self._seen[-1]
        apart = (now - last).abs()
        moved = float(apart.max())
        usual = float((last - self._seen[0]).abs().max()) if self._counted else 0.0
        usual = max(usual, float(self._by_hand))
        if not (self._changes or (at_the_end and moved > _LARGE * usual)):
            return ""
        since = "since the last counted step" if self._counted else "and no step was counted"
        what = f"{self._names[int(apart.argmax())]!r} has moved by {moved:.3g}"
        if not moved:
            what = "parameters were changed"
        times = f" {self._changes} times between backward passes" if self._changes else ""
        return f"{what}{times}, {since}"

    def _passed(self, parameter: Tensor) -> None:
        begins = not self._fired or id(parameter) in self._fired
        self._fired = {id(parameter)} if begins else self._fired | {id(parameter)}
        if self.stepping or not begins:  # LBFGS computes gradients within a step
            return
        version = self._versions() - self.forward.changes
        if not self._passes:
            if not self._counted:
                self.mark(counted=False)  # until then weights may be loaded
        elif version != self._version:
            self._changes += 1
        self._passes, self._version = self._passes + 1, version
        if self._changes >= self._limit and (what := self.lost()):
            raise OptionError(f"{what}: {REMEDY}")

    def _versions(self) -> int:
        """A number that grows with every change of a parameter in place."""
        return sum(param._version for param in self._parameters)  # noqa: SLF001 - torch has no other

    @torch.no_grad()
    def place(self) -> tuple[int, Tensor]:
        """What changes when the model is changed outside of its forward pass."""
        return self._versions() - self.forward.changes, self._outside()

    def _outside(self) -> Tensor:
        """The watched elements, without what forward passes have changed."""
        return self._now() - self.forward.moved

    def _now(self) -> Tensor:
        """The watched elements."""
        rows = [some(memory(param)) for _, param in self._watched]
        return torch.cat(rows).float() if rows else torch.zeros(1, device="cpu")


REMEDY = (
    "its training would be lost; give the algorithm the optimizer whose step() moves the model, and"
    " make a new algorithm where that is another one; weights put in by hand, such as a moving"
    " average, come after the end of the block, and a layer that changes its weights does so in the"
    " forward() of the model"
)
