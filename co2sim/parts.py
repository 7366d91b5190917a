"""A table in a folder of Parquet files that may be stopped at any time, and go on later.

Every part holds the cases of certain places, whoever computed them and in whatever order, and so
its bytes depend on the cases alone. What the folder held before is found by the key of a case.
"""

import io
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from co2sim.errors import OptionError
from co2sim.files import check_writable, is_folder, is_regular, read_bytes, write_atomically

ROWS = 1000
"""Of a part: a few seconds of the cheapest cases, and far less than a megabyte."""
_EARLIER = "_earlier"
"""A folder inside, which readers of Parquet skip: parts of other cases, until all is complete."""
_AT_HAND = 64
"""Parts that are kept in memory after they were read."""
_KEY_BYTES = 16


class Parts:
    """The parts of one table; `prefix` names the shard that they are of, if any.

    Raises OptionError for a folder that holds something else, or without pyarrow.
    """

    def __init__(self, folder: Path, columns: Mapping[str, str], prefix: str = "") -> None:
        """Find out what the folder holds."""
        self._arrow, self._parquet = _pyarrow()
        self._folder, self._prefix = folder, prefix
        self._columns = dict(columns)
        self._schema = self._arrow.schema(
            [(name, self._arrow.type_for_alias(kind)) for name, kind in columns.items()]
        )
        if folder.exists() and not is_folder(folder):
            raise OptionError(f"cannot write into {folder}: it is not a folder")
        check_writable(folder)
        self._files = [*folder.glob("*.parquet"), *(folder / _EARLIER).glob("*.parquet")]
        self._places, self._keys = self._index()
        self._at_hand: OrderedDict[int, Any] = OrderedDict()
        self._written: set[Path] = set()

    def find(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The rows with these keys that the folder has, but for those of cases that failed."""
        wanted = np.array([bytes.fromhex(key) for key in keys], dtype=f"V{_KEY_BYTES}")
        if not len(self._keys) or not len(wanted):
            return {}
        at = np.minimum(np.searchsorted(_ordered(self._keys), _ordered(wanted)), self._last)
        there = np.flatnonzero(self._keys[at] == wanted)
        by_file: dict[int, list[tuple[int, str]]] = {}
        for place in there.tolist():
            file, row = self._places[at[place]].tolist()
            by_file.setdefault(file, []).append((row, keys[place]))
        found: dict[str, dict[str, Any]] = {}
        for file, rows in by_file.items():
            table = self._table(file)
            places = [row for row, _ in rows if table is not None and row < table.num_rows]
            values = table.take(places).to_pylist() if places else []
            asked = {key for _, key in rows}
            # another process may have written the file anew meanwhile
            found |= {v["key"]: v for v in values if v["key"] in asked and v["error"] is None}
        return found

    def write(self, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a part, complete or not. What it held of other cases is kept until `finish`."""
        path = self._folder / f"{self._prefix}part-{number:06d}.parquet"
        table = self._arrow.Table.from_pylist(list(rows), schema=self._schema)
        content = io.BytesIO()
        self._parquet.write_table(table, content, compression="zstd")
        if not is_regular(path) or read_bytes(path) != content.getvalue():
            if path not in self._written:
                self._put_aside(path, {str(row["key"]) for row in rows})
            write_atomically({path: content.getvalue()})
        self._written.add(path)

    def finish(self) -> None:
        """The table is complete: remove the parts of other cases, and of shards, that it had.

        A shard leaves the parts of others alone.
        """
        earlier = self._folder / _EARLIER
        for path in [*self._folder.glob("*.parquet"), *earlier.glob("*.parquet")]:
            if path not in self._written and path.name.startswith(self._prefix):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # others may still need it
            earlier.rmdir()

    def _put_aside(self, path: Path, keys: set[str]) -> None:
        """Move a part that is there, and holds other cases, out of the way."""
        if not path.exists():
            return
        there = self._parquet.read_table(path, columns=["key"])["key"].to_pylist()
        if set(there) <= keys:
            return
        moved = self._folder / _EARLIER / f"{path.stem}-{secrets.token_hex(8)}.parquet"
        moved.parent.mkdir(exist_ok=True)
        path.rename(moved)
        self._files = [moved if one == path else one for one in self._files]

    def _index(self) -> tuple[Any, Any]:
        """File and row of every case that has figures, by rising key; 24 bytes each."""
        keys, places = [], []
        for file, path in enumerate(self._files):
            found = list(self._known(path))
            keys.append(np.array([key for _, key in found], dtype=f"V{_KEY_BYTES}"))
            rows = np.array([row for row, _ in found], dtype=np.int32)
            places.append(np.stack([np.full(len(rows), file, np.int32), rows], axis=1))
        if not keys:
            return np.empty((0, 2), np.int32), np.empty(0, f"V{_KEY_BYTES}")
        every = np.concatenate(keys)
        halves = _ordered(every)
        order = np.lexsort((halves["low"], halves["high"]))
        return np.concatenate(places)[order], every[order]

    @property
    def _last(self) -> int:
        return len(self._keys) - 1

    def _known(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Row and key of each case with figures in a file."""
        try:
            schema = self._parquet.read_schema(path)
            ours = schema.equals(self._schema)
            table = self._parquet.read_table(path, columns=["key", "error"]) if ours else None
        except (OSError, self._arrow.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise OptionError(f"cannot read {path}: {reason}; remove it, and go on") from None
        if table is None:
            raise OptionError(
                f"{path} has other columns than this table: it is of another question, or of"
                " another co2sim; give a folder of its own"
            )
        pairs = zip(table["key"].to_pylist(), table["error"].to_pylist(), strict=True)
        for row, (key, failed) in enumerate(pairs):
            if failed is None:
                yield row, bytes.fromhex(key)

    def _table(self, file: int) -> Any:
        """A file, read or at hand; None if it is gone."""
        if file not in self._at_hand:
            try:
                table = self._parquet.read_table(self._files[file])
            except (OSError, self._arrow.ArrowException):
                table = None
            self._at_hand[file] = table
            if len(self._at_hand) > _AT_HAND:
                self._at_hand.popitem(last=False)
        return self._at_hand[file]


def _ordered(keys: Any) -> Any:
    """Keys as pairs of numbers, which NumPy can sort: it has no order for bytes with zeros."""
    return keys.view([("high", ">u8"), ("low", ">u8")])


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise OptionError(
            "a folder of results needs pyarrow: pip install 'co2sim[parquet]'"
        ) from None
    return pa, parquet
