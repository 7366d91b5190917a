"""The record of an elastic training: a row for every generation of its members. Needs no torch."""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from co2sim.errors import CatalogError
from co2sim.files import MOST_RECORD_BYTES, text_of, write_atomically
from co2sim.units import Seconds
from realrun.launch.membership import ElasticMember
from realrun.train.folder import RECORD_OF_MEMBERS


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRow:
    """When the members of a training became others, as its first member saw it.

    `step` is the local step that it had taken or was in, `round` its round, counted from 0.
    `members`, `lost` and `joined` are as in "0.0 2.1": a rank, and how often it had been started
    before. `noticed` and `went_on` are seconds since 1970: when it knew, and when it trained on.
    `same` of `standing` members had used as many averages as itself and held the same anchor bit
    for bit; `anchor` is the hash of it.
    """

    generation: int
    step: int
    round: int
    members: str
    lost: str
    joined: str
    noticed: float
    went_on: float
    same: int
    standing: int
    anchor: str

    @property
    def stood_still(self) -> Seconds:
        """How long training stood still."""
        return self.went_on - self.noticed


_NAMES = tuple(field.name for field in fields(GenerationRow))
_WHOLE = {"generation", "step", "round", "same", "standing"}
_REAL = {"noticed", "went_on"}


def names(members: Iterable[ElasticMember]) -> str:
    """As in "0.0 2.1"."""
    return " ".join(map(str, members))


def append(folder: Path, row: GenerationRow) -> None:
    """Add a row: each is there once it is added, whoever leads next. The first begins the file.

    Raises OptionError if it cannot be written, and CatalogError for a record of another form.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, _NAMES, lineterminator="\n")
    writer.writeheader()
    before = read_generations(folder) if row.generation else ()
    writer.writerows(map(asdict, (*before, row)))
    write_atomically({folder / RECORD_OF_MEMBERS: text.getvalue().encode()})


def read_generations(folder: Path) -> tuple[GenerationRow, ...]:
    """The rows of a folder; none if there is no record."""
    path = folder / RECORD_OF_MEMBERS
    if not path.exists():
        return ()
    try:
        lines = text_of(path, MOST_RECORD_BYTES).splitlines()
        return tuple(map(_row, csv.DictReader(lines)))
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise CatalogError(f"{path} is not the record of an elastic training: {error}") from error


def _row(texts: Mapping[str, str]) -> GenerationRow:
    values: dict[str, Any] = {
        name: int(text) if name in _WHOLE else float(text) if name in _REAL else text
        for name, text in texts.items()
    }
    return GenerationRow(**values)


def summary(rows: Iterable[GenerationRow], rounds: int) -> dict[str, Any]:
    """For train.json: losses, rejoins, seconds that training stood still, rounds by members."""
    known = sorted(rows, key=lambda row: row.generation)
    starts = [*(row.round for row in known[1:]), rounds]
    by_members: dict[str, int] = {}
    for row, until in zip(known, starts, strict=True):
        count = str(len(row.members.split()))
        by_members[count] = by_members.get(count, 0) + max(0, until - row.round)
    return {
        "losses": sum(len(row.lost.split()) for row in known),
        "rejoins": sum(len(row.joined.split()) for row in known[1:]),
        "seconds_stood_still": sum(row.stood_still for row in known[1:]),
        "rounds_by_members": by_members,
        "anchors_equal": all(row.same == row.standing for row in known),
    }
