"""Options that can be given in several ways: the type on the wire, and how long to wait."""

from datetime import timedelta
from typing import Literal, TypeAlias, get_args

import torch

from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.common.validation import above
from realrun.errors import one_of

Wire: TypeAlias = Literal["fp32", "bf16", "int8", "int4"]
"""What averages travel as."""

WIRES: dict[torch.dtype, Wire] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
}

DEADLINE: Seconds = 60.0
"""How long a worker waits for another, unless it is said."""


def wire_of(dtype: Wire | torch.dtype) -> Wire:
    """The option `dtype`, by its name or as torch's: torch.bfloat16 is "bf16"."""
    if isinstance(dtype, torch.dtype):
        if dtype not in WIRES:
            known = ", ".join(map(str, WIRES))
            raise OptionError(f"dtype is {dtype}; averages travel as one of {known}")
        return WIRES[dtype]
    one_of("dtype", dtype, get_args(Wire))
    return dtype


def wait_of(deadline: Seconds | None, timeout: Seconds | timedelta | None) -> Seconds:
    """Seconds that a worker waits for another: one option under two names."""
    if deadline is not None and timeout is not None:
        raise OptionError(
            f"deadline={deadline} and timeout={timeout} are the same option; give one of them"
        )
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    name, given = ("deadline", deadline) if timeout is None else ("timeout", timeout)
    if given is None:
        return DEADLINE
    return above(name, given, 0)
