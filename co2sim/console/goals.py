"""The options that name a loss to reach, and what steps are worth."""

from collections.abc import Iterable
from typing import Annotated

import typer

from co2sim.console.options import number, whole
from co2sim.errors import OptionError
from co2sim.step_factors import Goal

ToLossSteps = Annotated[
    int | None,
    typer.Option(
        parser=whole("--to-loss-steps"),
        metavar="N",
        help="Add time and cost to the loss that ddp reaches after N steps of this batch.",
    ),
]
StepsFactor = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STRATEGY=N",
        help="Steps that a strategy needs for one of ddp to the same loss, in place of the"
        " measured number: --steps-factor co2=1.3. Repeatable.",
    ),
]


def goal(steps: int | None, factors: Iterable[str] | None) -> Goal:
    """What --to-loss-steps and --steps-factor say."""
    found = {}
    for text in factors or ():
        name, separator, value = text.rpartition("=")  # options of a strategy have signs, too
        if not separator or not name.strip():
            raise OptionError(f"--steps-factor {text!r} is not STRATEGY=N")
        if name in found:
            raise OptionError(f"--steps-factor {name} is given twice")
        found[name] = number(f"--steps-factor {name}")(value)
    return Goal(steps=steps, factors=found)
