"""Averages that are used late: what workers keep, and in how many parts they travel."""

from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from co2sim.common.errors import OptionError
from co2sim.common.validation import between, whole

Delay: TypeAlias = int | Literal["auto"]
"""Local steps; "auto": as many as averages take."""

EVEN = 64
"""Fragments of a long round: more would make the messages small, and the delay no shorter."""

SHORTEST = 2
"""Steps of the shortest round that is chosen. In the study of benchmarks/convergence.py a round of
two steps in two fragments learns as much as one of one step, and sends half as much."""

LONGEST = 10_000
"""Steps of the longest round."""

MAX_FRAGMENTS = 1_000

_LONG = 8
"""Steps of a round from which on it is better to keep half of one's own progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateAverage:
    """How an average is used `delay` local steps after its launch, while workers continue.

    The model is cut into `fragments`, which launch at evenly spread steps of a round of tau steps.
    When D, the mean displacement of a fragment, arrives, its anchor takes the outer step, and then

    - keeps="launched": x <- anchor + keep (x - l) - predict (delay / tau) D, with l what the worker
      held at the launch. D points from the models to the anchor, so that - D is progress;
    - keeps="all": x <- anchor + keep (x - anchor), with the new anchor: a weighted mean of both.

    With `preview` a worker takes the outer step at once, at the launch, with its own displacement
    in place of the mean. Half of the difference goes when the mean comes, half with the next one.

    None stands for the default: in rounds below 8 steps all is kept, in longer ones half of it;
    predict is 1 - keep; with delay="auto" there is a fragment for each step of a round, up to 64,
    else one.
    """

    delay: Delay = "auto"
    keep: float | None = None
    predict: float | None = None
    fragments: int | None = None
    preview: bool = False
    keeps: Literal["launched", "all"] = "launched"

    def __post_init__(self) -> None:
        """Refuse options out of range, whatever the round."""
        if isinstance(self.delay, str) and self.delay != "auto":
            raise OptionError(f"delay is {self.delay!r}; it must be a whole number, or 'auto'")
        if self.delay != "auto":
            whole("delay", self.delay, 0 if self.keeps == "all" else 1)
        for name in ("keep", "predict"):
            if getattr(self, name) is not None:
                between(name, getattr(self, name), 0, 1)
        if self.fragments is not None:
            whole("fragments", self.fragments, 1, MAX_FRAGMENTS)
        if not isinstance(self.preview, bool):
            raise OptionError(f"preview is {self.preview!r}; it must be True or False")

    def of(self, tau: int) -> Self:
        """The same with numbers for defaults, in rounds of `tau` steps.

        Raises OptionError for a delay or fragments that a round has no steps for, and where what is
        predicted would be repeated for ever.
        """
        if self.delay != "auto":
            whole("delay", self.delay, 0 if self.keeps == "all" else 1, tau)
        parts = self.parts(tau)
        whole("fragments", parts, 1, min(tau, MAX_FRAGMENTS))
        keep, predict = kept(tau, self.keep, self.predict)
        check_predict(tau, self.delay, keep, predict)
        return replace(self, keep=keep, predict=predict, fragments=parts)

    @property
    def shortest_round(self) -> int:
        """Steps of the shortest round that these options fit into, where tau is chosen."""
        if self.delay == "auto":
            return self.fragments or SHORTEST
        predicted = int((self.predict or 0.0) * self.delay) + 1
        return max(self.delay, self.fragments or 1, predicted if self.predict else 1)

    def parts(self, tau: int) -> int:
        """The number of fragments in rounds of `tau` steps."""
        if self.fragments is not None:
            return self.fragments
        return even_fragments(tau) if self.delay == "auto" else 1


def even_fragments(tau: int) -> int:
    """One fragment for each step of a round, as far as that helps."""
    return min(tau, EVEN)


def kept(tau: int, keep: float | None, predict: float | None) -> tuple[float, float]:
    """`keep` and `predict` of a late average: what was given, else all progress or half of it.

    A choice from trials with one small GPT and four workers, used one step late. In rounds of up to
    6 steps all progress was best kept, or within the noise of the best. In rounds of 12 a half was
    0.006 nats better than all (`benchmarks/results/convergence-runs.csv`, one seed), and three
    quarters 0.004 better than that. predict = 1 - keep.
    """
    share = (1.0 if tau < _LONG else 0.5) if keep is None else keep
    return share, 1 - share if predict is None else predict


def bounded(tau: int, delay: int, keep: float, predict: float) -> float:
    """What is predicted after a delay that was measured: `predict`, if what it repeats dies out.

    A predicted step is part of the next displacement, so that a share p = predict delay / tau of
    each average comes again in the next one: that ends only if p < 1 (docs/theory.md, the late
    average). Else 1 - keep, which replaces no more than what is not kept.
    """
    return predict if predict * delay < tau else min(predict, 1 - keep)


def check_predict(tau: int, delay: int | Literal["auto"], keep: float, predict: float) -> None:
    """Raise OptionError where what is predicted would be repeated for ever; see `bounded`."""
    if delay == "auto":
        delay, predict = tau, bounded(tau, tau, keep, predict)
    if predict * delay >= tau:
        raise OptionError(
            f"predict={predict:g} with keep={keep:g}, and an average used up to delay={delay} steps"
            f" late in rounds of tau={tau}: predict times delay / tau is {predict * delay / tau:g}"
            " and must be below 1, or progress is repeated for ever; take less of one"
        )
