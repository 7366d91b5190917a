"""The command `co2sim own` with its options."""

from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common.errors import OptionError
from co2sim.common.validation import between
from co2sim.prediction.case import Case

_YEARS = (0.25, 20)
"""Least and most."""
_LEAST_USED = 0.001


def _years(text: str) -> float:
    return between("--years", options.number("--years")(text), *_YEARS)


def _share(text: str) -> float:
    """A share such as 70% or 0.7."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = 0.0
    if not _LEAST_USED <= found <= 1:
        raise OptionError(f"--utilization is {text!r}; it must be 0.1% to 100%")
    return found


@options.own_options
def own(
    case: Case,
    years: Annotated[str, typer.Option(metavar="N", help="How long it is kept.")] = "3",
    utilization: Annotated[
        str,
        typer.Option(metavar="SHARE", help="The part of all hours in which GPUs are used."),
    ] = "70%",
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Compare owning a cluster with renting it; --set own.NAME=VALUE changes any number.

    With a model and a strategy also by token. `co2sim list ownership`, `list nodes` and
    `list electricity` show all numbers.
    """
    from co2sim.cli import own_answer  # noqa: PLC0415 - rich

    own_answer.answer(case, _years(years), _share(utilization), as_json=json_)
