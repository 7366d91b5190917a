"""A question from the files of a trainer: what was taken of them, and what was not."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from co2sim.catalog import Contents, load_model, names
from co2sim.catalog.facts import key_of
from co2sim.common import convert
from co2sim.common.errors import CatalogError, Co2simError, nearest
from co2sim.prediction.question import Question
from co2sim.strategies import STRATEGIES, parse
from co2sim.strategies.step import title
from co2sim.trainers.files import Unset, Values, read
from co2sim.trainers.tables import Table, Take, tables
from co2sim.training.framework import layers

_MOST_FILES = 8
_MOST_NAMES = 12
"""Of keys in a line."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a file with its value, and what became of it: an option, or an effect."""

    file: str
    name: str
    value: Any
    became: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.became}" if self.became else self.name


@dataclass(frozen=True, slots=True)
class Reading:
    """What files of a trainer say.

    `options` are those of a `Question`, by name; its cluster is not among them. `taken` are keys
    and what they became, `ignored` do not matter to speed, `missing` matter and cannot be
    expressed, and `unknown` are in no table.
    """

    trainer: str
    files: tuple[str, ...]
    options: Mapping[str, Any]
    taken: tuple[Key, ...]
    ignored: tuple[Key, ...]
    missing: tuple[Key, ...]
    unknown: tuple[Key, ...]

    def question(self, **more: Any) -> Question:
        """The question, with the cluster and what else is given; that wins over the files.

        Raises OptionError where something is missing, such as the model.
        """
        overrides = {**self.options.get("overrides", {}), **more.pop("overrides", {})}
        return Question(**{**self.options, **more, "overrides": overrides})


def read_trainer(*paths: str | Path, trainer: str = "") -> Reading:
    """What files of one training say, together; of two that state the same the later one counts.

    `trainer` names its table, where the keys do not say it. Raises CatalogError for what cannot be
    read, with the file and the key.
    """
    parts = _with_included([Path(path) for path in paths], trainer)
    options: dict[str, _Stated] = {}
    lists: dict[str, list[Key]] = {n: [] for n in ("taken", "ignored", "missing", "unknown")}
    for table, path, values in parts:
        _take(table, path, values, options, lists)
    for table, _, _ in reversed(parts):
        for name, value in {**table.defaults, "stack": table.stack}.items():
            options.setdefault(name, _Stated(value, "", table.title))
    made = _Composed(options, str(parts[-1][1])).options()
    return Reading(
        trainer=" with ".join(dict.fromkeys(table.title for table, _, _ in reversed(parts))),
        files=tuple(str(path) for _, path, _ in reversed(parts)),
        options=made,
        **{name: tuple(some) for name, some in lists.items()},
    )


@dataclass(frozen=True, slots=True)
class _Stated:
    """The value of an option, and the key of which file states it."""

    value: Any
    key: str
    file: str

    @property
    def where(self) -> str:
        return f"{self.file}: {self.key}" if self.key else self.file


_Found = tuple[Table, Path, Values]


def _with_included(paths: Sequence[Path], trainer: str) -> list[_Found]:
    """Each file with its table, behind the files that it names: of two the later one counts."""
    parts: list[_Found] = []
    seen: set[Path] = set()

    def add(path: Path, trainer: str) -> None:
        if path in seen:
            return
        seen.add(path)
        if len(seen) > _MOST_FILES:
            raise CatalogError(f"more than {_MOST_FILES} files of one training, with {path}")
        values = read(path)
        table = _table(path, values, trainer)
        for key in table.includes:
            name = next((v for k, v in values.items() if table.key(k) == key), None)
            if isinstance(name, str) and not isinstance(name, Unset) and name:
                add(_beside(path, key, name), "")
        parts.append((table, path, values))

    for path in paths:
        add(path, trainer)
    return parts


def _beside(path: Path, key: str, name: str) -> Path:
    other = path.parent / name
    if not other.is_file():
        raise CatalogError(f"{path}: {key} names {name}, which is no file beside it")
    return other


def _table(path: Path, values: Values, trainer: str) -> Table:
    """The trainer whose keys these are."""
    names = list(values)
    if trainer:
        named = {table.name: table for table in tables()}
        if trainer not in named:
            raise CatalogError(f"no trainer {trainer!r} is known; {nearest(trainer, named)}")
        return named[trainer]
    marked = [table for table in tables() if table.marked(names)]
    if not marked:
        titles = ", ".join(table.title for table in tables())
        raise CatalogError(f"{path}: no trainer is known by its keys; known are {titles}")
    return max(marked, key=lambda table: sum(map(table.knows, names)))


def _take(
    table: Table,
    path: Path,
    values: Values,
    options: dict[str, _Stated],
    lists: Mapping[str, list[Key]],
) -> None:
    """Sort the keys of a file into these lists, and put what they say to the options."""
    for name, value in values.items():
        key, file = table.key(name), str(path)
        if key in table.includes or value is None or value == "auto":
            continue
        if key in table.take:
            become, effect = _become(table.take[key], value, f"{path}: {name}")
            if become is not None:
                option = table.take[key].option
                options[option] = _Stated(become, name, file)
                lists["taken"].append(Key(file, name, value, _words(option, become)))
            elif effect:
                lists["missing"].append(Key(file, name, value, effect))
            else:
                lists["ignored"].append(Key(file, name, value, ""))
        elif key in table.warn:
            warn = table.warn[key]
            off = value in (False, 0, "") or value in warn.fine
            kind = "ignored" if off else "missing"
            lists[kind].append(Key(file, name, value, "" if off else warn.effect))
        elif table.is_ignored(key):
            lists["ignored"].append(Key(file, name, value, ""))
        else:
            lists["unknown"].append(Key(file, name, value, ""))


def _become(take: Take, value: Any, where: str) -> tuple[Any, str]:
    """What a value is here, or why it cannot be; neither where it says nothing."""
    if isinstance(value, Unset):
        raise CatalogError(
            f"{where} is {value}, which the file does not set; write the value there"
        )
    if take.values:
        several = value if isinstance(value, list) else [value, *re.split(r"[\s,]+", str(value))]
        texts = [str(each).lower() for each in several]
        values = [take.by_text[text] for text in texts if text in take.by_text]
        if values:
            return (None if values[0] == "" else values[0]), ""
        if take.effect or isinstance(value, list):
            return None, take.effect
        raise CatalogError(f"{where} is {value!r}; it is one of {', '.join(take.values)}")
    if take.value is not None:
        return (take.value, "") if value is True else (None, "")
    if isinstance(value, list):
        raise CatalogError(f"{where} is a list; it is one value")
    return value, ""


# --- what the options are together ----------------------------------------------------------------

_COUNTS = {
    field.name
    for field in fields(Question)
    if int in get_args(get_type_hints(Question)[field.name])
    or get_type_hints(Question)[field.name] is int
} | {"nodes", "gpus_per_node", "gpus", "replicas", "shards", "chunk_layers", "data_parallel"}
_NARROW = "narrow"


@dataclass(frozen=True, slots=True)
class _Composed:
    """Options of a question, made of what all trainers state."""

    stated: Mapping[str, _Stated]
    file: str

    def options(self) -> dict[str, Any]:
        """By name, as `Question` takes them."""
        names = {field.name for field in fields(Question)} - {"cluster", "model", "strategy"}
        made = {name: self._of(name) for name in self.stated if name in names}
        made |= {"gpus": self._gpus(), "model": self._model(), "strategy": self._strategy()}
        made |= {"precision": self._of(_NARROW) or self._of("precision")}
        if "chunk_layers" in self.stated:
            made["interleave"] = self._chunks(made["model"])
        heads = ("model.", "stack.")
        overrides = {n: _text(self.stated[n].value) for n in self.stated if n.startswith(heads)}
        made = {name: value for name, value in made.items() if value is not None}
        if {"accumulation", "global_batch"} <= made.keys():  # one follows from the other
            made.pop("global_batch" if self.stated["accumulation"].key else "accumulation")
        if made.get("tp", 1) == 1:
            made.pop("sequence_parallel", None)
        if made.get("tp", 1) == 1 or made.get("ep", 1) == 1:  # then tp divides experts in any case
            made.pop("etp", None)
        return made | {"overrides": overrides}

    def _of(self, name: str) -> Any:
        """Its value, converted where it is a number; None where nothing states it."""
        if name not in self.stated:
            return None
        stated = self.stated[name]
        if name == "etp" and stated.value == "tp":
            return self._of("tp")
        if name not in _COUNTS or (isinstance(stated.value, str) and name == "global_batch"):
            return stated.value
        if name in {"shards", "global_batch", "accumulation"} and stated.value in {-1, 0}:
            return None
        try:
            return convert.whole(stated.where, stated.value)
        except Co2simError as error:
            raise CatalogError(str(error)) from error

    def _gpus(self) -> int | None:
        if gpus := self._of("gpus"):
            return int(gpus)
        if each := self._of("gpus_per_node"):
            return int(each) * int(self._of("nodes") or 1)
        if ranks := self._of("data_parallel"):
            return int(ranks) * self._layer_gpus()
        return None

    def _layer_gpus(self) -> int:
        return math.prod(int(self._of(name) or 1) for name in ("tp", "cp", "pp"))

    def _model(self) -> Any:
        sizes = {n.removeprefix("dim."): s for n, s in self.stated.items() if n.startswith("dim.")}
        if any(stated.key for stated in sizes.values()):
            return self._own_model({name: stated.value for name, stated in sizes.items()})
        text = self._of("model")
        if text is None:
            return None
        size = self._of("size")
        written = (f"{text}-{size}", f"{text}{size}") if size else (str(text),)
        keys = (key_of("models", name) for name in written)
        return next((key for key in keys if key in names("models")), written[0])

    def _own_model(self, values: dict[str, Any]) -> Contents:
        tree: dict[str, Any] = {"name": f"the model of {Path(self.file).name}"}
        tree |= {"kind": "transformer", "source": self.file}
        experts = {n.removeprefix("experts."): v for n, v in values.items() if "experts." in n}
        tree |= {name: value for name, value in values.items() if "experts." not in name}
        if experts.get("count"):
            experts.setdefault("width", tree.get("ffn"))
            tree["experts"] = experts
        if "hidden" in tree:
            tree.setdefault("ffn", 4 * tree["hidden"])
        if "model.seq_len" in self.stated:
            tree["seq_len"] = self.stated["model.seq_len"].value
        for name in ("layers", "hidden", "heads", "vocab", "seq_len"):
            if name not in tree:
                raise CatalogError(f"{self.file}: no key says the model's {name}")
        return Contents(self.file, tree)

    def _strategy(self) -> str | None:
        base = self._of("strategy")
        if base is None:
            return None
        options = {
            name.removeprefix("strategy."): stated.value
            for name, stated in self.stated.items()
            if name.startswith("strategy.")
        }
        replicas, shards = (self._of(name) for name in ("replicas", "shards"))
        if shards == 1 and base.startswith("fsdp"):
            base = "ddp"
        elif (replicas or 1) > 1:
            gpus = self._gpus()
            shards = shards or (gpus // self._layer_gpus() // int(replicas) if gpus else None)
            options["shard"] = shards
        name, _, text = base.partition(":")
        options = dict(part.split("=") for part in text.split(",") if part) | options
        if (options.get("hpz_group") or 1) > 1:
            options["hpz"] = True
        if name == "zero3" and any(options.get(part) for part in ("qwz", "hpz", "qgz")):
            name = "zeropp"
            options = {"qwz": False, "hpz": False, "qgz": False} | options
        names = {field.name for field in fields(STRATEGIES[name])}
        pairs = [f"{n}={_text(v)}" for n, v in options.items() if n in names and v is not None]
        return title(parse(f"{name}:{','.join(pairs)}" if pairs else name))

    def _chunks(self, model: Any) -> int:
        try:
            count = len(layers(load_model(model).value.blocks))
        except Co2simError as error:
            raise CatalogError(f"{self.stated['chunk_layers'].where}: {error}") from error
        chunk, stages = self._of("chunk_layers"), self._of("pp") or 1
        if count % (stages * chunk):
            raise CatalogError(
                f"{self.stated['chunk_layers'].where} is {chunk}; {count} layers in {stages} stages"
                " have no such chunks"
            )
        return int(count // (stages * chunk))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(option: str, value: Any) -> str:
    """An option as one gives it."""
    name, _, part = option.partition(".")
    if name in {"model", "stack"} and part:
        return f"--set {option}={_text(value)}"
    if name == "strategy":
        return f"-s {value}" if not part else f"{part}={_text(value)} of the strategy"
    if name == "dim":
        return f"{part.replace('.', ' ')} {_text(value)} of the model"
    options = {field.name for field in fields(Question)}
    return f"--{name.replace('_', '-')} {_text(value)}" if name in options else f"{value} {name}"


def lines(reading: Reading) -> Iterable[str]:
    """What was taken, what does not matter, and what does and is not counted."""
    yield f"{', '.join(reading.files)}: {reading.trainer}"
    if reading.taken:
        yield f"taken: {', '.join(f'{key.name} ({key.became})' for key in reading.taken)}"
    if reading.ignored:
        yield f"no matter to speed: {_few(reading.ignored)}"
    for key in reading.missing:
        yield f"warning: {key.name}={key.value} is not counted: {key.became}"
    if reading.unknown:
        yield f"warning: not known, and left out: {_few(reading.unknown)}"


def _few(keys: Sequence[Key]) -> str:
    names = list(dict.fromkeys(key.name for key in keys))
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"
