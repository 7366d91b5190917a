"""A sweep that goes to a folder as it runs: any number of cases, in the memory of a few thousand.

What the folder has already is not computed again. Parts are written when they are complete, and
those that are not every half minute, so that a kill costs no more than that.
"""

import inspect
import io
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

from co2sim.catalog import Contents
from co2sim.common.convert import shown
from co2sim.common.errors import Co2simError, EngineError, OptionError
from co2sim.common.files import check_writable, is_folder, is_regular, read_bytes, write_atomically
from co2sim.common.progress import Done, progress_bar
from co2sim.common.units import Seconds, counted
from co2sim.common.version import own_identity
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal
from co2sim.strategies import parse
from co2sim.studies.grid import LazyGrid, Setting, Shard, display_name
from co2sim.studies.pools import Pool
from co2sim.studies.run_all import Failure, outcome_of, run_on_pool
from co2sim.studies.table import DERIVED, NESTED, TO_LOSS, TOTALS, VARIED, memory_column, row_of

ROWS = 1000
"""Of a part: a few seconds of the cheapest cases, and far less than a megabyte."""
_EARLIER = "_earlier"
"""A folder inside, which readers of Parquet skip: parts of other cases, until all is complete."""
_AT_HAND = 64
"""Parts that are kept in memory after they were read."""
_KEY = "S16"
"""Bytes of a key, as NumPy has them."""


class ParquetParts:
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
        self._table = lru_cache(_AT_HAND)(self._read)
        self._written: set[Path] = set()

    def find(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The rows with these keys that the folder has, but for those of cases that failed."""
        wanted = np.array([bytes.fromhex(key) for key in keys], dtype=_KEY)
        if not len(self._keys) or not len(wanted):
            return {}
        near = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        there = np.flatnonzero(self._keys[near] == wanted)
        by_file: dict[int, list[tuple[int, str]]] = {}
        for index in there.tolist():
            file, row = self._places[near[index]].tolist()
            by_file.setdefault(file, []).append((row, keys[index]))
        known_rows: dict[str, dict[str, Any]] = {}
        for file, rows in by_file.items():
            table = self._table(file)
            places = [row for row, _ in rows if table is not None and row < table.num_rows]
            values = table.take(places).to_pylist() if places else []
            wanted_here = {key for _, key in rows}
            # another process may have written the file again meanwhile
            known_rows |= {
                v["key"]: v for v in values if v["key"] in wanted_here and v["error"] is None
            }
        return known_rows

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
        self._files = [moved if file == path else file for file in self._files]

    def _index(self) -> tuple[Any, Any]:
        """File and row of every case that has figures, by rising key; 24 bytes each."""
        keys, places = [], []
        for file, path in enumerate(self._files):
            pairs = list(self._known(path))
            keys.append(np.array([key for _, key in pairs], dtype=_KEY))
            rows = np.array([row for row, _ in pairs], dtype=np.int32)
            places.append(np.stack([np.full(len(rows), file, np.int32), rows], axis=1))
        if not keys:
            return np.empty((0, 2), np.int32), np.empty(0, _KEY)
        every = np.concatenate(keys)
        order = np.argsort(every, kind="stable")
        return np.concatenate(places)[order], every[order]

    def _known(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Row and key of each case with figures in a file."""
        try:
            schema = self._parquet.read_schema(path)
            ours = schema.equals(self._schema)
            table = self._parquet.read_table(path, columns=["key", "error"]) if ours else None
        except (OSError, self._arrow.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise OptionError(f"cannot read {path}: {reason}; remove it, and continue") from None
        if table is None:
            raise OptionError(
                f"{path} has other columns than this table: it is of another question, or of"
                " another co2sim; give another folder"
            )
        pairs = zip(table["key"].to_pylist(), table["error"].to_pylist(), strict=True)
        for row, (key, failed) in enumerate(pairs):
            if failed is None:
                yield row, bytes.fromhex(key)

    def _read(self, file: int) -> Any:
        """A file; None if it is gone."""
        try:
            return self._parquet.read_table(self._files[file])
        except (OSError, self._arrow.ArrowException):
            return None


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise OptionError("a folder of results needs pyarrow: pip install '.[parquet]'") from None
    return pa, parquet


MEMORY_ITEMS = (
    *("parameters", "gradients", "unreduced", "optimizer", "gathered", "bucket", "secondary"),
    *("outer", "casts", "activations", "checkpoints", "logits", "outputs", "workspace"),
    *("reduction", "update", "cached", "fragmentation", "nccl", "context", "total"),
)
"""Of every strategy here; `_OTHER` is the sum of what others keep."""
_OTHER = "other"

_KINDS: Mapping[type[Any], str] = {int: "int64", float: "double", bool: "bool", str: "string"}
"""Types of Arrow."""


def columns(paths: Iterable[str], goal: Goal, tokens: float | None) -> dict[str, str]:
    """Names with types of Arrow: place and key of a case, what varies, its figures, its error."""
    hints = get_type_hints(Result)
    kinds = {"case": "int64", "key": "string"}
    kinds |= {f"{VARIED}{path}": "string" for path in paths}
    kinds |= {"cluster_key": "string", "model_key": "string"}
    kinds |= {f.name: _kind(hints[f.name]) for f in fields(Result) if f.name not in NESTED}
    kinds |= dict.fromkeys(DERIVED, "double")
    kinds |= {memory_column(item): "double" for item in (*MEMORY_ITEMS, _OTHER)}
    kinds |= dict.fromkeys(TO_LOSS, "double") if goal.steps is not None else {}
    kinds |= dict.fromkeys(TOTALS, "double") if tokens is not None else {}
    return kinds | {"warnings": "string", "error": "string"}


def fitted(row: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """A row with these columns only, None where it has no value, and their types."""
    fit = {
        name: float(row[name]) if kind == "double" and row.get(name) is not None else row.get(name)
        for name, kind in kinds.items()
    }
    unknown = [name for name in row if name not in kinds and name.startswith("memory_")]
    if unknown:
        fit[memory_column(_OTHER)] = float(sum(row[name] for name in unknown))
    return fit


def _kind(hint: Any) -> str:
    options = [option for option in get_args(hint) if option is not NoneType]
    first = options[0] if options else hint
    return _KINDS[first if isinstance(first, type) else type(first)]  # of a choice, that of a word


_SAVE: Seconds = 30.0
"""Between two times that incomplete parts are written."""
_NAMED = 1000
"""Failures that are kept to be named."""


@dataclass(kw_only=True)
class FolderSummary:
    """What became of the cases of a sweep, or of its shard, that is kept in a folder.

    `computed` of them were simulated by now, `reused` stood in the folder already; `failed` of
    those computed have an error in place of figures, and the first of them are in `failures`, with
    what they vary.
    """

    folder: Path
    cases: int
    computed: int = 0
    reused: int = 0
    failed: int = 0
    failures: list[tuple[Setting, Failure]] = field(default_factory=list, repr=False)

    @property
    def done(self) -> int:
        """Cases that the folder has."""
        return self.computed + self.reused

    def so_far(self) -> str:
        """What the folder has of a sweep that did not end."""
        cases = counted(self.cases, "case")
        return (
            f"{self.done:,} of {cases} are in {self.folder}; the same command continues from there"
        )

    def summary(self) -> dict[str, Any]:
        """As plain values for JSON."""
        counts = {name: getattr(self, name) for name in ("cases", "computed", "reused", "failed")}
        return {"out": str(self.folder), **counts}


class SweepStopped(KeyboardInterrupt):
    """Control-C before all cases were done: what the folder has by now."""

    def __init__(self, kept: FolderSummary) -> None:
        super().__init__(kept.so_far())
        self.kept = kept


@dataclass(frozen=True)
class SweepTable:
    """What is asked for: the cases, the loss and the tokens of further columns, and the place."""

    points: LazyGrid
    folder: Path
    shard: Shard = field(default_factory=Shard)
    goal: Goal = NO_GOAL
    tokens: float | None = None


def stream(
    table: SweepTable,
    pool: Pool | None,
    progress: bool | None = None,  # noqa: FBT001
) -> FolderSummary:
    """Simulate what the folder does not have yet.

    Raises `SweepStopped` at control-C, EngineError where no worker is left, and OptionError for a
    folder that cannot be written; whatever was done by then is in the folder.
    """
    with progress_bar("simulating cases", shown=progress) as done:
        run = _FolderWriter(table, done)
        try:
            run.through(pool)
        except KeyboardInterrupt:
            run.save()
            raise SweepStopped(run.kept) from None
        except EngineError as error:
            run.save()
            raise EngineError(f"{error}; {run.kept.so_far()}") from error
        except BaseException:
            with suppress(Co2simError):  # such as a full disk, which is what is raised
                run.save()
            raise
    run.parts.finish()
    return run.kept


@dataclass(slots=True)
class _Part:
    """Rows of a part by their places; complete when there are `size` of them.

    `unsaved` says whether some were computed after it was written.
    """

    number: int
    size: int
    keys: dict[int, str]
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    unsaved: bool = False


class _FolderWriter:
    """The parts that are not complete yet, and what became of the others."""

    def __init__(self, table: SweepTable, done: Done | None) -> None:
        self._table, self._done = table, done
        self._columns = columns(table.points.axes, table.goal, table.tokens)
        self.parts = ParquetParts(table.folder, self._columns, table.shard.prefix)
        self._places = table.shard.places(len(table.points))
        self.kept = FolderSummary(folder=table.folder, cases=len(self._places))
        self._inputs = Inputs([list(self._columns), table.goal, table.tokens])
        self._open: dict[int, _Part] = {}
        self._part_of: dict[int, _Part] = {}
        self._saved = time.monotonic()

    def through(self, pool: Pool | None) -> None:
        """Simulate all cases that are not there."""
        function = partial(figures, goal=self._table.goal, tokens=self._table.tokens)
        answers: Iterator[tuple[int, Any]]
        if pool is None:
            answers = ((index, function(case)) for index, case in self._missing())
        else:
            answers = run_on_pool(pool, self._missing(), function, len(self._places))
        for index, answer in answers:
            self._take(index, answer)

    def save(self) -> None:
        """Write what is there of parts that are not complete."""
        for part in self._open.values():
            if part.unsaved:
                self._write(part)
        self._saved = time.monotonic()

    def _missing(self) -> Iterator[tuple[int, Question]]:
        """Cases to simulate; their parts are open from now on."""
        places = iter(self._places)
        turn = 0
        while chunk := list(islice(places, ROWS)):
            yield from self._begin(turn, chunk)
            turn += 1

    def _begin(self, number: int, places: Sequence[int]) -> Iterator[tuple[int, Question]]:
        """Open a part, and take what is known of it; gives the other cases."""
        cases, keys = {}, {}
        wrong: dict[int, Failure] = {}
        for index in places:
            try:
                case = self._inputs.inlined(self._table.points.at(index))
                cases[index], keys[index] = case, self._inputs.key(case)
            except Co2simError as error:
                wrong[index] = Failure("", error)
        self._open[number] = part = _Part(number, len(places), keys)
        self._part_of |= dict.fromkeys(places, part)
        rows = self.parts.find(list(keys.values()))
        for index, failure in wrong.items():
            self._take(index, failure)
        for index, case in cases.items():
            row = rows.get(keys[index])
            if row is None:
                yield index, case
            else:
                self.kept.reused += 1
                self._note(index, row)

    def _take(self, index: int, answer: dict[str, Any] | Failure) -> None:
        """An answer of a worker, or the reason why there is no case."""
        self.kept.computed += 1
        self._part_of[index].unsaved = True
        if isinstance(answer, Failure):
            self.kept.failed += 1
            if len(self.kept.failures) < _NAMED:
                setting = self._table.points.setting(index)
                self.kept.failures.append((setting, answer))
            answer = row_of(self._known(index), answer)
        self._note(index, answer)
        if time.monotonic() - self._saved >= _SAVE:
            self.save()

    def _known(self, index: int) -> Question:
        """The case there; where none can be, what all have in common."""
        try:
            return self._table.points.at(index)
        except Co2simError:
            return self._table.points.case

    def _note(self, index: int, row: dict[str, Any]) -> None:
        part = self._part_of.pop(index)
        varied = {
            f"{VARIED}{p}": display_name(v) for p, v in self._table.points.setting(index).items()
        }
        whole = {**row, **varied, "case": index, "key": part.keys.get(index, "")}
        part.rows[index] = fitted(whole, self._columns)
        if len(part.rows) == part.size:
            self._write(part)
            del self._open[part.number]
        if self._done:
            self._done(self.kept.done, self.kept.cases)

    def _write(self, part: _Part) -> None:
        self.parts.write(part.number, [part.rows[index] for index in sorted(part.rows)])
        part.unsaved = False


def figures(case: Question, goal: Goal, tokens: float | None) -> dict[str, Any] | Failure:
    """In a worker: the row of a case, or why it has none."""
    outcome = outcome_of(case)
    if not isinstance(outcome, Result):
        return outcome
    try:
        return row_of(case, outcome, goal, tokens)
    except Co2simError as error:
        return Failure(case.title, error)


_CHARACTERS = 32
"""Of a key: 128 bits, so that no two of any number of cases share one."""


class Inputs:
    """Reads the files of cases, each once: a study is of one state of them.

    `further` is what results depend on besides their case.
    """

    def __init__(self, further: Any = None) -> None:
        """Nothing is read yet."""
        self._files: dict[tuple[object, ...], Contents | None] = {}
        self._strategies: dict[str, Any] = {}
        self._trees: dict[int, tuple[object, str]] = {}  # which keeps the object, and so its id
        self._start = sha256(_text([str(own_identity()), own_identity().source, _plain(further)]))

    def inlined(self, case: Question) -> Question:
        """See `Question.inlined`."""
        return case.inlined(self._files)

    def key(self, case: Question) -> str:
        """A hash of an inlined case, of what results depend on besides, and of co2sim itself.

        Two cases that differ in how they are written only, such as co2:tau=2 and co2(tau=2), have
        one key. Raises OptionError for an object that does not say what it computes.
        """
        values = {field.name: getattr(case, field.name) for field in fields(case)}
        values["cluster"] = self._loaded(case.cluster)
        values["model"] = self._loaded(case.model)
        values["stack"] = self._loaded(case.stack)
        values["optimizer"] = self._loaded(case.optimizer)
        if isinstance(case.strategy, str):
            values["strategy"] = self._strategy(case.strategy)
        else:
            values["strategy"] = _plain(case.strategy)
        values["overrides"] = list(case.overrides.items())  # in order: it names the cluster
        values["noise"] = _plain(case.noise)
        digest = self._start.copy()
        digest.update(_text(values))
        return digest.hexdigest()[:_CHARACTERS]

    def _loaded(self, thing: Any) -> Any:
        """A name of the catalog as it is; the hash of all else."""
        if isinstance(thing, str):
            return thing
        if id(thing) not in self._trees:
            read = isinstance(thing, Contents)
            plain = [thing.name, thing.tree, str(thing.chosen)] if read else _plain(thing)
            self._trees[id(thing)] = thing, sha256(_text(plain)).hexdigest()
        return [self._trees[id(thing)][1]]

    def _strategy(self, text: str) -> Any:
        if text not in self._strategies:
            try:
                self._strategies[text] = _plain(parse(text))
            except Co2simError:  # which the case will say
                self._strategies[text] = text
        return self._strategies[text]


def _text(plain: Any) -> bytes:
    return json.dumps(plain, default=str).encode()


def _plain(value: Any) -> Any:
    """A value for JSON: dataclasses with their names, and those of users with their source."""
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        inside = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return [f"{kind.__module__}.{kind.__qualname__}", _source(kind), inside]
    if isinstance(value, Mapping):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, AbstractSet):
        return sorted(map(str, value))
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not getattr(value, "ndim", 1):
        return value.item()
    raise _unknown(value)


def _source(kind: type[Any]) -> str | None:
    """Of a class that is not ours, whose changes the hash of our source does not show."""
    if kind.__module__.partition(".")[0] == "co2sim":
        return None
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        raise _unknown(kind) from None


def _unknown(value: object) -> OptionError:
    return OptionError(
        f"{shown(value)}: nothing says when its results change; a strategy that is kept with its"
        " results must be a dataclass of plain values in a file of Python"
    )
