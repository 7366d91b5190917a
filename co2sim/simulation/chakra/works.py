"""Works of a schedule as attributes of Chakra nodes: those of the standard, and all there is.

What a standard attribute cannot say (a data type, a buffer, kernels) stands in the text of the
work, once in a file; the standard attributes are what a simulator of others reads.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from co2sim.common import files
from co2sim.common.errors import Co2simError, OptionError
from co2sim.common.validation import first_problem
from co2sim.schedule.schedule import Collective, Compute, Kind, Work

if TYPE_CHECKING:
    from pydantic import TypeAdapter

COLLECTIVES: Mapping[Kind, str] = {
    Kind.ALL_REDUCE: "ALL_REDUCE",
    Kind.REDUCE: "REDUCE",
    Kind.ALL_GATHER: "ALL_GATHER",
    Kind.BROADCAST: "BROADCAST",
    Kind.ALL_TO_ALL: "ALL_TO_ALL",
    Kind.REDUCE_SCATTER: "REDUCE_SCATTER",
}
"""Kinds by the name of their Chakra type; GATHER, SCATTER and BARRIER we do not have."""

MOST = 2**63 - 1
"""Of a number in a trace: others read them as signed."""


def places(works: Iterable[Work]) -> dict[Work, int]:
    """The different works, buffers' names included, in order of first use, with their places."""
    return {work: index for index, work in enumerate(dict.fromkeys(works))}


def is_alone(work: Work, members: int) -> bool:
    """Whether it is a collective of one rank, which sends nothing."""
    return isinstance(work, Collective) and members == 1


def node_type(work: Work, members: int) -> str:
    """The type of the node of a work, where `members` meet; a rank that is alone computes."""
    return "COMP_NODE" if isinstance(work, Compute) or members == 1 else "COMM_COLL_NODE"


def numbers(work: Work, members: int) -> dict[str, int]:
    """The standard attributes that say how much there is to do, rounded up to whole numbers.

    `num_ops` in FLOP and `tensor_size` in bytes are at least 1: ASTRA-sim divides by both.
    `comm_size` is the input of a rank in bytes, as PyTorch and ASTRA-sim count: of an all-gather
    the part of one member, of all others the whole buffer. Raises OptionError above 2^63 - 1.
    """
    if isinstance(work, Compute):
        amounts = {"num_ops": _whole(work.flops), "tensor_size": _whole(work.memory_bytes)}
    elif members == 1:
        amounts = {"num_ops": 1, "tensor_size": 1}
    else:
        parts = members if work.kind is Kind.ALL_GATHER else 1
        amounts = {"comm_size": _whole(work.bytes / parts)}
    large = [f"{name} of {work} is {value:.3g}" for name, value in amounts.items() if value > MOST]
    if large:
        raise OptionError(f"{large[0]}; a Chakra trace holds at most {MOST:.3g}")
    return amounts


def _whole(value: float) -> int:
    return max(1, math.ceil(value))


def work_text(work: Work) -> str:
    """All of a work, as JSON: the fields of `Compute` or `Collective`."""
    return json.dumps(asdict(work), separators=(",", ":"))


def typed(work: Work) -> Work:
    """The same with every number of its type: amounts may be given as whole numbers."""
    validated: Work = _adapter().validate_python(asdict(work))
    return validated


def work_of(text: str) -> Work:
    """The work that `work_text` wrote. Raises ValueError for other texts."""
    from pydantic import ValidationError  # noqa: PLC0415 - slow

    try:
        work: Work = _adapter().validate_python(files.json_tree(text))
    except ValidationError as error:
        raise ValueError(f"its work {first_problem(error)}") from error
    except Co2simError as error:
        raise ValueError(str(error)) from error
    return work


@cache
def _adapter() -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # noqa: PLC0415 - slow

    return TypeAdapter(Compute | Collective)
