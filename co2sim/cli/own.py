"""The command `co2sim own` with its options."""

from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common.errors import OptionError
from co2sim.common.validation import between
from co2sim.prediction.case import Case

_YEARS = (0.25, 20)
"""Least and most."""


def _years(text: str) -> float:
    return between("--years", options.number("--years")(text), *_YEARS)


def _share(text: str) -> float:
    """A share such as 70% or 0.7."""
    bare, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    found = options.number("--utilization")(bare) / (100 if percent else 1)
    if not 0 < found <= 1:
        raise OptionError(f"--utilization is {text!r}; it must be above 0 and at most 100%")
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
