"""Types of the fields of catalog files: quantities with units, counts, and closed tables."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from co2sim.errors import OptionError, UnitError
from co2sim.quantities import Quantity
from co2sim.units import parse


def number(quantity: Quantity) -> BeforeValidator:
    """A text with a unit, as a number in the unit and the range of the quantity."""

    def read(value: Any) -> float:
        try:
            number = parse(value, quantity.unit)
        except UnitError as error:
            raise ValueError(str(error)) from error
        try:
            return quantity.checked("", number)
        except OptionError as error:
            raise ValueError(f"must be {quantity.allowed_for(number)}") from error

    return BeforeValidator(read)


def no_truth(value: Any) -> Any:
    """Refuse `true` and `false`, which Python would take for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("must be a whole number")  # noqa: TRY004 - pydantic's
    return value


Count = Annotated[int, BeforeValidator(no_truth), Field(ge=1, le=10**12)]
Natural = Annotated[int, BeforeValidator(no_truth), Field(ge=0, le=10**15)]
Depth = Annotated[int, BeforeValidator(no_truth), Field(ge=1, le=10_000)]
"""Blocks of a model: the schedule holds every one of them."""


class Spec(BaseModel):
    """A table in which any name that is not a field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
