"""An algorithm among workers that come and go."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from realrun.algorithms.elastic import ElasticAverage
from realrun.algorithms.links import Links
from realrun.algorithms.outer_loop import OuterLoop, mark_of


class Regrouping:
    """The part of an algorithm that changes its workers: each rank must be one.

    It is made alone (`Workers(None)`). Then `make_elastic`; and for every new set of workers
    `connect`, and on those that hold no state yet `take_over`.
    """

    _links: Links
    _outer: OuterLoop
    _started: bool
    _described: str

    def make_elastic(self, recover: Callable[[str], None]) -> ElasticAverage:
        """Launch averages anew when a worker is lost; see ElasticAverage for `recover`."""
        outer, rule = self._outer, self._outer.rule
        kept = rule.late.fragments if rule.late else max(1, rule.staleness)
        assert not isinstance(outer.average, ElasticAverage)
        outer.average = made = ElasticAverage(outer.average, kept, recover)
        return made

    def disconnect(self) -> None:
        """Let go of the workers."""
        assert isinstance(self._outer.average, ElasticAverage)
        self._outer.average.disconnect()
        self._links.let_go()

    def connect(self, links: Links) -> None:
        """Average over these workers. All of them call this, with the same model and settings.

        Raises MismatchError when they differ.
        """
        self._links = self._outer.links = links
        assert isinstance(self._outer.average, ElasticAverage)
        self._outer.average.connect(links.average)
        links.agree("model, optimizer or setting", self._described, across="")

    def shared(self) -> dict[str, Any]:
        """What a worker needs that joins: anchor, vectors of the rule, averages as they arrived."""
        return self._outer.state_dict()

    @torch.no_grad()
    def take_over(self, state: Mapping[str, Any]) -> None:
        """Begin at the anchor of another worker, with its state."""
        self._outer.load_state_dict(state)
        self._outer.start_at_anchor()
        self.begin()

    def begin(self) -> None:
        """Parameters are those of all, and are not compared again."""
        self._started = True

    @property
    def lag(self) -> int:
        """Rounds from the one that an average is launched in to the one in which it is used."""
        rule = self._outer.rule
        return 1 if rule.late else rule.staleness

    def drain(self) -> None:
        """Wait for averages under way, without using them."""
        self._outer.drain()

    def standing(self) -> tuple[float, str]:
        """How many averages the anchor has used, and a hash of it."""
        return self._outer.counters.used, mark_of(self._outer.state.anchor)
