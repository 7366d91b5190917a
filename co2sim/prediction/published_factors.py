"""What steps of local updates are worth by published losses, for a model's size and the workers.

The losses, their sources and the law that is fitted to them are
co2sim/catalog/published_step_factors.toml.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from co2sim.catalog.facts import read_table

_B, _BETA = 410.7, 0.28
"""Of the loss by tokens, E + A / N^a + B / D^b: Hoffmann et al. 2022, arXiv 2203.15556."""

FAR = 4.0
"""A size is beyond the published ones if it is this many times larger or smaller."""

_DEVIATIONS = 2.0
"""Half a range in standard deviations; twice that beyond what is published."""


@dataclass(frozen=True, slots=True)
class Published:
    """A step factor by published losses, its range, and in what it is beyond them."""

    factor: float
    low: float
    high: float
    beyond: tuple[str, ...]


def of_losses(ddp: float, loss: float, tokens: float) -> float:
    """The steps that a method needs for one of DDP, from both losses after the same tokens.

    The method has after D tokens what DDP has after D / factor. Below 1 where it learns more.
    """
    return float((1 + (loss - ddp) * tokens**_BETA / _B) ** (1 / _BETA))


def of_training(parameters: int, workers: int, tau: int, *, late: bool = False) -> Published:
    """The factor of DiLoCo by the law of the published losses.

    Rounds shorter than the published ones count as these, and sizes beyond the published ones as
    the nearest of them: that the factor falls with the size is not extrapolated. `late` averages
    are used a round later.
    """
    law = catalog()["law"]
    smallest, largest = law["sizes"]
    shortest, longest = law["taus"]
    logarithm = (
        law["constant"]
        + law["workers"] * math.log(workers)
        + law["tau"] * math.log(max(tau, shortest) / shortest)
        + law["parameters"] * math.log(min(max(parameters, smallest), largest) / 1e9)
        + (math.log(law["late"]) if late else 0.0)
    )
    beyond = []
    if not smallest / FAR <= parameters <= largest * FAR:
        beyond.append(f"{_short(parameters)} parameters")
    if workers > law["most_workers"]:
        beyond.append(f"{workers} workers")
    if tau > longest:
        beyond.append(f"tau={tau}")
    elif tau < shortest:
        beyond.append(f"tau={tau} (the factor is that of tau={shortest})")
    width = _DEVIATIONS * law["deviation"] * (2 if beyond else 1)
    ends = math.exp(logarithm - width), math.exp(logarithm + width)
    return Published(math.exp(logarithm), *ends, tuple(beyond))


def basis() -> str:
    """What the law rests on, as a text."""
    law = catalog()["law"]
    smallest, largest = map(_short, law["sizes"])
    shortest, longest = law["taus"]
    return (
        f"published losses of DiLoCo with {smallest} to {largest} parameters, 1 to"
        f" {law['most_workers']} workers, tau {shortest} to {longest}: arXiv 2503.09799, 2501.18512"
    )


def catalog() -> Mapping[str, Any]:
    """The published losses, and the law."""
    return read_table("published_step_factors")


def _short(parameters: float) -> str:
    """A number of parameters in millions or billions."""
    if parameters >= 1e9:  # noqa: PLR2004
        return f"{parameters / 1e9:.3g} billion"
    return f"{parameters / 1e6:.3g} million"
