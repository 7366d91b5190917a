"""Traces as files of JSON Lines, which may come from others: every line is checked."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from co2sim.common import files
from co2sim.common.errors import CatalogError, ScheduleError, given
from co2sim.common.files import MOST_RECORD_BYTES, text_of
from co2sim.common.units import Seconds
from co2sim.schedule.groups import Layout
from co2sim.simulation.trace import Span, Trace

_MOST = 10**9
"""Ranks, and rounds: beyond any trace that fits into a file."""
_LATEST: Seconds = 1e12
"""Of a time in a trace: 30,000 years."""
_FIELDS = frozenset(Span._fields)


def read_json_lines(path: Path) -> Trace:
    """Read a trace written by `to_json_lines`. Raises CatalogError when the file is not one."""
    try:
        lines = text_of(path, MOST_RECORD_BYTES).splitlines()
        head = _header(files.json_line(lines[0] if lines else ""))
        rows = zip(count(2), lines[1:], strict=False)
        return replace(head, spans=tuple(_span(head, number, line) for number, line in rows))
    except OSError as error:
        raise CatalogError(f"{path} is not a trace in JSON Lines: {error.strerror}") from error
    except (ValueError, ScheduleError) as error:
        raise CatalogError(f"{path} is not a trace in JSON Lines: {error}") from error


def _header(row: Any) -> Trace:
    """What the first line says. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError(f"line 1 is {given(row)}; it must be an object")  # noqa: TRY004 - as below
    lacking = [name for name in ("schedule", "nodes", "gpus_per_node", "rounds") if name not in row]
    if lacking or not isinstance(row.get("ranks"), dict):
        raise ValueError(
            f"line 1 has no {(lacking or ['ranks'])[0]!r}, as the first line must have"
        )
    counts = [row["nodes"], row["gpus_per_node"], row.get("sites", 1), row["rounds"]]
    counts += row["ranks"].values()
    wrong = [one for one in counts if type(one) is not int or not 1 <= one <= _MOST]
    wrong += [rank for rank in row["ranks"] if not _is_rank(rank)]
    wrong += [] if isinstance(row["schedule"], str) else [row["schedule"]]
    if wrong:
        raise ValueError(
            f"line 1 holds {given(wrong[0])}; its counts must be whole numbers of 1 or more, and"
            " its schedule a text"
        )
    return Trace(
        schedule=row["schedule"],
        layout=Layout(row["nodes"], row["gpus_per_node"], row.get("sites", 1)),
        rounds=row["rounds"],
        ranks={int(rank): many for rank, many in row["ranks"].items()},
        spans=(),
    )


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < len(str(_MOST))


def _span(head: Trace, number: int, line: str) -> Span:
    """The span of a line. Raises ValueError."""
    row = files.json_line(line)
    if not isinstance(row, dict) or row.keys() != _FIELDS:
        raise ValueError(f"line {number} must be an object of {', '.join(Span._fields)}")
    span = Span(**row)
    whole = type(span.rank) is int and type(span.round) is int
    if not whole or span.rank not in head.ranks or not 0 <= span.round < head.rounds:
        raise ValueError(
            f"line {number}: rank {given(span.rank)} and round {given(span.round)} must be among"
            " those of the first line"
        )
    if not isinstance(span.op, str) or not isinstance(span.stream, str):
        raise ValueError(f"line {number}: op and stream must be texts")  # noqa: TRY004 - as above
    times = span.start, span.end
    if not all(type(time) in {int, float} and -_LATEST < time < _LATEST for time in times):
        raise ValueError(f"line {number}: start and end must be numbers of seconds")
    return span
