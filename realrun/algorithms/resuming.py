"""What an algorithm saves and loads, rank by rank."""

import re
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from co2sim.common.errors import Co2simError, OptionError
from realrun.algorithms.buffers import ExtraState, write
from realrun.algorithms.consistency import (
    say_mixed_models,
)
from realrun.algorithms.delayed import Stats
from realrun.algorithms.outer_loop import OuterLoop, mark_of
from realrun.algorithms.pacing import AutoTau
from realrun.algorithms.process_groups import (
    WorkerGroups,
)
from realrun.algorithms.step_counting import ModelWatch

_MODEL = "model"
"""Among the numbers of a state: what tells the model that was saved with it."""


class Resumable:
    """The part of an algorithm that is saved and loaded, rank by rank."""

    _links: WorkerGroups
    _outer: OuterLoop
    _layout: str
    _started: bool
    _choosing: AutoTau | None
    """While tau is still to be chosen."""
    _failure: Co2simError | None
    _watch: ModelWatch
    _extra: ExtraState
    _parameters: list[tuple[str, Tensor]]
    _saved_with: float | None = None
    """What tells the model with which a loaded state was saved, until the next step."""
    _replaced: list[tuple[Tensor, Tensor]]
    """What other ranks' first parameters and buffers took the place of, until the first step."""

    def stats(self) -> Stats:
        """What was done so far."""
        raise NotImplementedError

    def _ready(self, what: str) -> None:
        """Raise OptionError where what all ranks do together would be wrong."""
        raise NotImplementedError

    def _refuse_lost(self, what: str, *, together: bool = False) -> None:
        """Raise OptionError where steps were taken that were not counted."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """All that is kept, this rank's part under the key `rankR`. All ranks call this.

        Averages under way are waited for and saved as they arrived, so a resumed run does what the
        uninterrupted one does, bit for bit. Within a round workers hold different models: every
        rank must save its own model and optimizer, too (torch.distributed.checkpoint keeps one copy
        of what is not sharded: give those a key per rank). Every key is one rank's own, so that
        torch.distributed.checkpoint keeps all of them: `dcp.save({"co2": co2, ...})`. Tensors are
        the live ones, as in optimizers: copy what is not written at once.
        """
        self._ready("state_dict()")
        self._refuse_lost("state_dict()")
        say_mixed_models([one for _, one in self._parameters], type(self).__name__)
        own = self._outer.state_dict()
        own["numbers"][_MODEL] = self._watch.total()
        return {_key(): {"layout": self._layout, **own}}

    @torch.no_grad()
    def load_anchor(self, state: Mapping[str, Any]) -> None:
        """Continue with another number of workers than saved `state`. All ranks call this.

        `state` is what `state_dict` gave on any rank that held the same part of the parameters: any
        at all where a worker is one rank. Averages that were under way are used. What workers had
        learned since they launched their last ones is lost; so are the states of their optimizers,
        unless you load one of them everywhere. A mean of more or fewer workers is less or more
        noisy: think of the learning rate. Raises OptionError, and MismatchError where ranks load
        different anchors.
        """
        self._ready("load_anchor()")
        own = next(iter(state.values()), None)
        if not isinstance(own, Mapping) or "layout" not in own:
            raise OptionError(
                f"the saved state holds {', '.join(sorted(map(str, state))) or 'nothing'};"
                " load_anchor() takes what state_dict() of the algorithm gave"
            )
        self._refuse_other_layout(own["layout"], _one_worker)
        self._load(own)
        self._outer.counters.step = 0
        self._outer.use_all()
        self._agree_on("anchor", mark_of(self._outer.state.anchor))

    def _load(self, own: Mapping[str, Any]) -> None:
        self._outer.load_state_dict(own)
        if self._outer.counters.tau:
            self._choosing = None

    def _refuse_other_layout(self, saved: str, form: Callable[[str], str] = str) -> None:
        pairs = zip_longest(form(saved).splitlines(), form(self._layout).splitlines())
        for line, here in pairs:
            if line != here:
                other = str(line).startswith("workers = ")
                raise OptionError(
                    f"the saved state is of another run: {line!r}, here {here!r}"
                    + (": load it on as many ranks, or take load_anchor()" if other else "")
                )

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave on this rank. All ranks call this.

        The model and the optimizer are yours to load, before this is made or after. Algorithm, tau,
        staleness, parameters and workers must be those that were saved (OptionError), and all ranks
        must load what was saved after the same step (MismatchError); other settings may change.
        """
        self.take_state(state)
        self.agree_on_state()

    @torch.no_grad()
    def take_state(self, state: Mapping[str, Any]) -> None:
        """The first part of `load_state_dict`, on this rank alone.

        For loops that tell all ranks when one of them cannot load; `agree_on_state` comes after.
        """
        self._ready("load_state_dict()")
        if not isinstance(state, Mapping):
            raise OptionError(f"the saved state is a {type(state).__name__}; it must be a dict")
        if _key() not in state:
            raise OptionError(
                f"the saved state holds {', '.join(sorted(state)) or 'nothing'}, not {_key()}:"
                " load it on as many ranks as saved it, or take load_anchor()"
            )
        own = state[_key()]
        self._refuse_other_layout(own["layout"])
        self._load(own)
        self._saved_with = own["numbers"].get(_MODEL)
        if not self._watch.loaded():  # the model was, before this algorithm was made
            for tensor, before in self._replaced:
                write(tensor, before)
        self._replaced = []

    def agree_on_state(self) -> None:
        """The second part: all ranks have loaded what was saved after the same step."""
        self._agree_on("saved state", f"of step {self.stats().steps}")

    def _agree_on(self, what: str, text: str) -> None:
        """All ranks have loaded what belongs together; if not, no step will be taken."""
        self._links.steps, self._started = self.stats().steps, True
        self._watch.forget()
        self._extra.forget_frozen()
        try:
            self._links.agree(what, "", across=text)
        except Co2simError as error:
            self._failure = error
            raise


def _one_worker(layout: str) -> str:
    """What is saved in common by any number of workers."""
    return re.sub(r"^workers = \d+ of ", "workers of ", layout, flags=re.MULTILINE)


def _key() -> str:
    return f"rank{dist.get_rank() if dist.is_initialized() else 0}"
