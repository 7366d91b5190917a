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

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from co2sim.common.errors import OptionError
from realrun.algorithms.flat_parameters import memory, some
from realrun.algorithms.optimizers import held

_WATCHED = 4
"""Parameters of which some elements are watched."""
_LARGE = 4.0
"""Steps of one local step's size: what moves further without one is no small correction."""
_MIN_PASSES = 20
"""Backward passes without a step that are waited for, at least."""
_WRAPPERS = [one for one in Optimizer.profile_hook_step.__code__.co_consts if iscode(one)]
"""The code of what torch puts around `step` to call its hooks."""


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers that it holds, of the same parameters: SAM has one that takes the steps."""
    own = {id(one) for one in held([optimizer])}
    found = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    return [one for one in found if {id(each) for each in held([one])} <= own]


class StepHooks:
    """The hooks of optimizers: `before` every step, and `after` those that are local steps."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        before: Callable[[], None],
        after: Callable[[Optimizer], None],
    ) -> None:
        self._outer = {inner: one for one in optimizers for inner in inner_optimizers(one)}
        self._inside: set[Optimizer] = set()
        self._before, self._after = before, after
        self.all = (*optimizers, *self._outer)
        # A compiled step calls the hooks as they are: what they do with other ranks is no graph.
        pre, post = map(torch.compiler.disable, (self._pre, self._post))
        self._handles: list[RemovableHandle] = []
        for one in self.all:
            self._handles.append(one.register_step_pre_hook(pre))
            self._handles.append(one.register_step_post_hook(post))

    def remove(self) -> None:
        """Let go of the optimizers."""
        for handle in self._handles:
            handle.remove()

    def _pre(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        del optimizer, args, kwargs
        self._before()

    def _post(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        del args, kwargs
        if sum(1 for _ in islice(self._running(), 2)) > 1:
            return  # within another step, which counts
        outer = self._outer.get(optimizer, optimizer)
        if outer is not optimizer:
            self._inside.add(optimizer)
            if any(one not in self._inside for one, of in self._outer.items() if of is outer):
                return
            self._inside -= {one for one, of in self._outer.items() if of is outer}
        self._after(outer)

    def _running(self) -> Iterator[Optimizer]:
        """Those of the optimizers in whose hooked `step` this is called, the innermost first."""
        frame = sys._getframe(1)  # noqa: SLF001 - an exception leaves no frame, but a flag
        while frame is not None:
            if frame.f_code in _WRAPPERS:
                one = frame.f_locals.get("self") or frame.f_locals["args"][0]
                if one in self.all:
                    yield one
            frame = frame.f_back  # type: ignore[assignment]


class ModelWatch:
    """Notices that the model moves though no local step is counted.

    It looks at some elements: those of the last counted step, and those of now.
    """

    def __init__(self, parameters: Sequence[tuple[str, Tensor]], tau: int) -> None:
        chosen = [pair for pair in parameters if memory(pair[1]).numel()]
        step = max(1, -(-len(chosen) // _WATCHED))
        self._watched = chosen[::step]
        self._limit = max(_MIN_PASSES, 4 * tau)
        self._passes, self._counted = [0] * len(self._watched), False
        self._views = [some(memory(one)) for _, one in self._watched]
        self._names = [name for name, one in self._watched for _ in some(memory(one))]
        self._seen: deque[Tensor] = deque(maxlen=2)
        self._handles = [
            one.register_post_accumulate_grad_hook(self._hook(place))  # type: ignore[no-untyped-call]
            for place, (_, one) in enumerate(self._watched)
            if not isinstance(one, DTensor)
        ]
        self.mark(counted=False)

    def remove(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def mark(self, *, counted: bool = True) -> None:
        """What the model holds now is as it should be: after a local step, or as it was loaded."""
        if not counted:
            self._seen.clear()
        self._counted |= counted
        self._passes = [0] * len(self._passes)
        self._seen.append(self._kept() if counted and len(self._seen) > 1 else self._now())

    @torch.no_grad()
    def moved(self) -> bool:
        """Whether the model is another one than it was last."""
        return bool(self._seen) and not torch.equal(self._now(), self._seen[-1])

    def forget(self) -> None:
        """A saved state was loaded, and weights may be: begin with what the first pass finds."""
        self._counted = False
        self._passes = [0] * len(self._passes)
        self._seen.clear()

    @torch.no_grad()
    def lost(self, *, at_the_end: bool = False) -> str:
        """What has moved without a counted step, and why that is no small correction; or nothing.

        Where steps are counted a model may be changed after one of them, such as clamped. That is
        taken for progress, unless gradients were computed since, or it moves far. Weights that were
        loaded before the first step are lost only `at_the_end`.
        """
        if not self._seen:
            return ""
        now, last = self._now(), self._seen[-1]
        apart = (now - last).abs()
        moved = float(apart.max()) if len(apart) else 0.0
        if not moved:
            return ""
        passes = max(self._passes, default=0)
        usual = float((last - self._seen[0]).abs().max())
        if not passes and (moved <= _LARGE * usual if self._counted else not at_the_end):
            return ""
        name = self._names[int(apart.argmax())]
        since = (
            "since the last step that was counted" if self._counted else "and no step was counted"
        )
        seen = f" in {passes} backward passes" if passes else ""
        return f"{name!r} has moved by {moved:.3g}{seen}, {since}"

    def _hook(self, place: int) -> Callable[[Tensor], None]:
        def passed(_: Tensor) -> None:
            if not self._counted and not any(self._passes):
                self.mark(counted=False)  # until then weights may be loaded
            self._passes[place] += 1
            if self._passes[place] % self._limit == 0 and (what := self.lost()):
                raise OptionError(f"{what}: {REMEDY}")

        return torch.compiler.disable(passed)  # type: ignore[no-any-return,no-untyped-call]

    def _now(self) -> Tensor:
        """The watched elements, where the parameters have their memory now."""
        self._views = [some(memory(one)) for _, one in self._watched]
        return self._kept()

    def _kept(self) -> Tensor:
        """The watched elements, where the parameters had their memory last."""
        return torch.cat(self._views).float() if self._views else torch.zeros(1)


REMEDY = (
    "its training would be lost; give the algorithm the optimizer whose step() moves the model, and"
    " make a new algorithm where that is another one"
)
