"""Stragglers, mixed hardware and jitter, drawn from a seed so that a run can be repeated."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from co2sim.common.convert import option
from co2sim.common.errors import OptionError
from co2sim.common.validation import above, between, whole
from co2sim.schedule.schedule import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What makes ranks differ.

    `node_speed` gives single nodes a relative compute speed (1 is nominal). `straggle` is the sigma
    of a lognormal factor on the compute time of each node, `jitter` that of every op; both have
    mean 1, so that they add spread, not work.
    """

    node_speed: Mapping[int, float] = option(
        {},
        "Relative compute speed of one node: --node-speed 3=0.8. Repeatable.",
        "simulation",
    )
    straggle: float = option(
        0.0, "Sigma of a lognormal factor on the compute time of every node.", "simulation"
    )
    jitter: float = option(
        0.0, "Sigma of a lognormal factor on the time of every op; 0: none.", "simulation"
    )
    seed: int = option(0, "Seed of jitter and stragglers.", "simulation")

    def __post_init__(self) -> None:
        """Refuse spreads out of range, and speeds of what is no node or not above 0."""
        for name in ("straggle", "jitter"):
            between(name, getattr(self, name), 0, 1)
        whole("seed", self.seed, 0)
        for node, speed in self.node_speed.items():
            whole("node", node)
            above(f"speed of node {node} (1 is nominal)", speed, 0)

    @property
    def uneven(self) -> bool:
        """Whether any rank may differ from another, or from its nominal speed."""
        return bool(self.node_speed or self.straggle or self.jitter)

    def node_slowdowns(self, layout: Layout) -> tuple[float, ...]:
        """Factor on the compute time of each node."""
        unknown = [node for node in self.node_speed if node >= layout.nodes]
        if unknown:
            raise OptionError(f"node {unknown[0]} has a speed; nodes are 0 to {layout.nodes - 1}")
        if not (self.straggle or self.node_speed):
            return (1.0,) * layout.nodes
        drawn = _factors([self.seed, 0], self.straggle, layout.nodes)
        for node, speed in self.node_speed.items():
            drawn[int(node)] /= speed  # 1.0 is a node, too
        return tuple(drawn.tolist())

    def op_slowdowns(self, family: int, member: int, count: int) -> NDArray[np.float64]:
        """Factors of `count` consecutive ops of one rank (family 1) or communicator (family 2)."""
        return _factors([self.seed, family, member], self.jitter, count)


QUIET = Noise()
"""No differences between ranks."""


def _factors(seed: list[int], sigma: float, count: int) -> NDArray[np.float64]:
    if not sigma:
        return np.ones(count)
    return np.random.default_rng(seed).lognormal(-sigma * sigma / 2, sigma, count)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a schedule is simulated: `rounds` to average (None: 1, or 10 with jitter), or folded."""

    noise: Noise = QUIET
    rounds: int | None = None
    fold: bool = True
