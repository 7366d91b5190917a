"""Which failures an answer counts, and what part of the time they leave.

Those of the cluster, if it names any. Else a training of more than a week counts those of published
jobs (`co2sim list published` has the numbers and their sources): nothing that runs for
weeks on many GPUs runs through. `--set failures=none` counts none.
"""

from dataclasses import dataclass

from co2sim.catalog import load_failures
from co2sim.common.units import Seconds, timespan
from co2sim.hardware.cluster import Cluster
from co2sim.hardware.failures import Failures
from co2sim.models.operators import Model
from co2sim.prediction.goodput import Goodput, Shares, goodput_where, trained_of
from co2sim.prediction.result import Result
from co2sim.training.optimizer import ADAMW, Optimizer

DEFAULT = "published"
"""The failures of the catalog that count where a cluster names none."""
WEEK = 7.0
"""Days of training without failures; more than that, and failures count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedFailures:
    """What failures leave of the time: `shares` of it, of which the useful one is `low` to `high`.

    Something fails `every` seconds on average, anywhere on the job's GPUs. `assumed`: the
    cluster names no failures, and these are those of published jobs.
    """

    name: str
    shares: Shares
    low: float
    high: float
    every: Seconds
    assumed: bool

    @property
    def useful(self) -> float:
        """The share of the time that is work which lasts."""
        return self.shares.useful

    @property
    def words(self) -> str:
        """Whose failures, how often, and the useful time: "98.9 % useful time (97 to 99.5 %)"."""
        ends = ""
        if self.low < self.high:
            ends = f" ({100 * self.low:.3g} to {100 * self.high:.3g} %)"
        return (
            f"failures {self.name}, one in {timespan(self.every)}:"
            f" {100 * self.useful:.3g} % useful time{ends}"
        )


def failures_of(cluster: Cluster, days: float) -> Failures | None:
    """The failures that a training counts which takes `days` without them; None: none."""
    if cluster.failures is not None or not cluster.count_failures or days <= WEEK:
        return cluster.failures
    return load_failures(DEFAULT).value


def counted_failures(
    result: Result, cluster: Cluster, model: Model, days: float, *, optimizer: Optimizer = ADAMW
) -> CountedFailures | None:
    """What failures leave of a training of `days` without them; None where none count.

    `cluster` and `model` are those of the question, of any size: that of the result counts. Raises
    OptionError where nothing gets done.
    """
    failures = failures_of(cluster, days)
    if failures is None:
        return None
    trained = trained_of(result, cluster, model, optimizer=optimizer)
    return counted_of(goodput_where(failures, trained), cluster)


def counted_of(goodput: Goodput, cluster: Cluster) -> CountedFailures:
    """What is counted of the failures of a cluster, or of published jobs, by their goodput."""
    return CountedFailures(
        name=goodput.failures.name or "as given",
        shares=goodput.shares,
        low=goodput.low,
        high=goodput.high,
        every=1 / goodput.failures_per_second,
        assumed=cluster.failures is None,
    )
