"""A question from the files of a trainer: what was taken of them, and what was not."""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from co2sim.catalog import Contents
from co2sim.common.errors import CatalogError, nearest
from co2sim.prediction.question import AUTO, Question
from co2sim.trainers.composing import GIVEN_BY, Composed, Stated, text_of
from co2sim.trainers.files import Content, Unset, place, read
from co2sim.trainers.tables import LAUNCHERS, Table, Take, tables

_RULES_OUT: Mapping[str, Mapping[str, Any]] = {
    "tp": {"sequence_parallel": False, "etp": 1},
    "pp": {"interleave": 1, "schedule": "1f1b"},
}
"""What there is only where another option is more than 1."""
_ONE_OF = "accumulation", "global_batch"
_MOST_FILES = 24
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
    expressed, and `unknown` are in no table. `assumed` are what the trainer has where no key says
    it, and `notes` what else is to be known. `unset` are options whose keys have variables that
    nothing sets, with what to say of each: they have to be given.
    """

    trainer: str
    files: tuple[str, ...]
    options: Mapping[str, Any]
    taken: tuple[Key, ...]
    ignored: tuple[Key, ...]
    missing: tuple[Key, ...]
    unknown: tuple[Key, ...]
    unset: Mapping[str, str]
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def question(self, **more: Any) -> Question:
        """The question, with the cluster and what else is given; that wins over the files.

        Raises OptionError where something is missing, such as the model, and CatalogError where
        it is one of `unset`.
        """
        self.refuse_unset({*more, *more.get("overrides", {})})
        overrides = {**self.options.get("overrides", {}), **more.pop("overrides", {})}
        values = self.without_ruled_out({**self.options, **more})
        return Question(**{**values, "overrides": overrides})

    def without_ruled_out(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values, less those of the files that another one rules out, such as pp=1 chunks."""
        kept = dict(values)
        of_files = {n for n, value in values.items() if self.options.get(n) == value}
        for name, others in _RULES_OUT.items():
            if values.get(name) == 1:
                kept |= {n: usual for n, usual in others.items() if n in of_files}
        batch = {n for n in _ONE_OF if values.get(n) not in {None, AUTO}}
        if len(batch) > 1 and len(batch & of_files) == 1:
            kept |= dict.fromkeys(batch & of_files)
        return kept

    def refuse_unset(self, stated: Collection[str]) -> None:
        """Raise CatalogError where an option is open that is not given."""
        first, *others = [name for name in self.unset if name not in stated] or [""]
        if first:
            also = f"; and {', '.join(map(_flag, others))}" if others else ""
            raise CatalogError(f"{self.unset[first]}; give {_flag(first)}{also}")


def _flag(option: str) -> str:
    """How an option is given that nothing sets."""
    return f"--set {option}=..." if "." in option else f"--{option.replace('_', '-')}"


def read_trainer(*paths: str | Path) -> Reading:
    """What files of one training say, together; of two that state the same the later one counts.

    TRAINER:FILE names the table, where the keys do not say it, and FILE:PART one of the trainings
    that a script starts, from 1, or a function of Python. Raises CatalogError for what cannot be
    read, with the file and the key.
    """
    parts = _with_included([_Asked.of(path) for path in paths])
    options: dict[str, Stated] = {}
    lists: dict[str, list[Key]] = {n: [] for n in ("taken", "ignored", "missing", "unknown")}
    last = _last(parts)
    for table, key in last.values():
        beside = (name.rpartition("=") for name in table.idle.get(table.key(key.name), ()))
        values = ((last.get((table.name, name)), value) for name, _, value in beside)
        if any(other and str(other[1].value) == value for other, value in values):
            lists["ignored"].append(key)
        else:
            _take(table, key, options, lists)
    lists["taken"] += _sums(last, options)
    _refuse_both(lists["taken"])
    for part in reversed(parts):
        _add_usual(part, options, alone=len(parts) == 1)
    made = Composed(options, str(parts[-1].path))
    for name, why in ((name, why) for part in parts for name, why in part.absent.items()):
        if not options.get(name, _ONE).key:
            made.open(name, why)
    all_options = made.options()
    return Reading(
        trainer=" with ".join(dict.fromkeys(part.table.title for part in reversed(parts))),
        files=tuple(str(part.path) for part in reversed(parts)),
        options=all_options,
        unset=made.unset,
        assumed=tuple(_assumed(options, all_options)),
        notes=tuple(note for part in parts for note in part.notes),
        **{name: tuple(some) for name, some in lists.items()},
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A file, with the trainer in front of it and the part behind it that the user names."""

    path: Path
    trainer: str = ""
    part: str = ""

    @classmethod
    def of(cls, path: str | Path) -> "_Asked":
        """From TRAINER:FILE:PART, of which only the file has to be there."""
        text = str(path)
        trainer, separator, rest = text.partition(":")
        if Path(text).is_file() or not (separator and trainer.isidentifier()):
            trainer, rest = "", text
        head, _, part = rest.rpartition(":")
        if head and part.isidentifier() | part.isdecimal() and not Path(rest).is_file():
            return cls(Path(head), trainer, part)
        return cls(Path(rest), trainer)


def _refuse_both(taken: Sequence[Key]) -> None:
    """Refuse flags that are on together and state two types: all trainers do."""
    on = [key for key in taken if key.value is True and key.became.startswith("--precision ")]
    for first, second in itertools.pairwise(on):
        if first.became != second.became and first.file == second.file:
            names = f"{first.name} and {second.name}"
            raise CatalogError(f"{first.file}: {names} are both true; a trainer takes one of them")


def _assumed(stated: Mapping[str, Stated], options: Mapping[str, Any]) -> Iterator[str]:
    """What no key says of what the options have, as one gives it."""
    parts = {GIVEN_BY.get(name) for name, of_key in stated.items() if of_key.key}
    for name, usual in stated.items():
        head, _, part = name.partition(".")
        has = name not in parts and {
            "dim": isinstance(options.get("model"), Contents),
            "strategy": f"{part}={text_of(usual.value)}" * bool(part)
            in options.get("strategy", ()),
            "stage_batch": "micro_tokens" not in stated,
            "stack": name in {"stack", *options["overrides"]},
            "model": name in options["overrides"],
        }.get(head, name in options)
        if has and not usual.key and usual.value is not None:
            yield _words(name, options[name] if usual.value == "tp" else usual.value)
    model = options.get("model")
    if isinstance(model, str) and "model.seq_len" not in stated:
        yield "sequences as long as the model's"
    if isinstance(model, Contents) and "dim.ffn" not in stated:
        yield _words("dim.ffn", model.tree["ffn"])


_ONE = Stated(1, "", "")


def _add_usual(part: "_Part", options: dict[str, Stated], *, alone: bool) -> None:
    """What its trainer has where no key says another; "auto" is said by another program."""
    table = part.table
    usual = {**table.defaults, "stack": table.stack}
    usual |= table.script if part.content.is_script else {}
    for name in (name for name, value in part.content.values.items() if value == "auto" and alone):
        if take := table.take.get(table.key(name)):
            usual.pop(take.option, None)
    for name, value in part.content.values.items():
        usual |= table.implies.get(f"{table.key(name)}={str(value).lower()}", {})
    for option, value in usual.items():
        options.setdefault(option, Stated(value, "", table.title))
    if options.get("pp", _ONE).value not in {1, None}:
        for option, value in table.pipeline.items():
            if not options.get(option, _ONE).key:
                options[option] = Stated(value, "", table.title)


@dataclass(frozen=True, slots=True)
class _Part:
    """A file, what it says, and whose it is."""

    path: Path
    content: Content
    table: Table
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> Iterator[str]:
        """What is to be known of it."""
        if (several := self.content.trainings) > 1:
            others = f"{self.path}:N reads another, N from 1 to {several}"
            yield f"{self.path} starts {several} trainings, of which one is read; {others}"


def _with_included(files: Sequence[_Asked]) -> list[_Part]:
    """Each file behind the files that it names: of two the later one counts."""
    parts: list[_Part] = []
    seen: set[Path] = set()

    def add(file: _Asked, text: str | None = None, among: str = "") -> None:
        path = file.path
        if path in seen:
            return
        seen.add(path)
        if len(seen) > _MOST_FILES:
            raise CatalogError(f"more than {_MOST_FILES} files of one training, with {path}")
        content = read(path, text, file.part)
        table = _table(path, content, file.trainer, among)
        absent: dict[str, str] = {}
        for other, written in (*_included(path, content, table, absent), *_named(path, content)):
            add(_Asked(other), written, among=table.name)
        if table is LAUNCHERS:  # flags behind what it starts are those of its trainer
            table = parts[-1].table if parts else table
        parts.append(_Part(path, content, table, absent))

    for file in files:
        add(file)
    if all(part.table is LAUNCHERS for part in parts):
        raise _unknown_trainer(files[0].path)
    return parts


def _named(path: Path, content: Content) -> Iterator[tuple[Path, str | None]]:
    """Files of configuration that a script hands on, if they are here, or if it writes them."""
    written = (value for value in content.values.values() if isinstance(value, str))
    for name in (*content.named, *filter(content.written.__contains__, written)):
        if name in content.written:
            yield path.parent / Path(name).name, content.written[name]
        elif other := place(path, name, ("",)):
            yield other, None


def _included(
    path: Path, content: Content, table: Table, absent: dict[str, str]
) -> Iterator[tuple[Path, str | None]]:
    """Files that keys name, and their texts, where the file writes these itself.

    `absent` gets the options that files would say which are not here.
    """
    opens = {**LAUNCHERS.opens, **table.opens}
    for name, value in content.values.items():
        key = table.key(name)
        if key not in table.includes and not (content.is_script and key in LAUNCHERS.includes):
            continue
        for other in _file_names(value, is_bare=key in table.bare_names):
            file = place(path, other, table.places)
            texts = {Path(name).name: text for name, text in content.written.items()}
            text = texts.get(Path(other).name)
            if text is not None:
                yield path.parent / Path(other).name, text
            elif file:
                yield file, None
            elif key in opens:
                absent[opens[key]] = f"{path}: {name} names {other}, which is no file beside it"
            elif key not in table.take:
                raise CatalogError(f"{path}: {name} names {other}, which is no file beside it")


def _file_names(value: Any, *, is_bare: bool = False) -> Iterator[str]:
    """Of one, which may be without its ending, or of a list of Hydra, which has groups, too."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, Mapping) and len(each) == 1:
            group, name = next(iter(each.items()))
            if name and not re.search(r"[@ ]", str(group)):
                yield f"{group}/{name}.yaml"
        elif isinstance(each, str) and each and not isinstance(each, Unset) and each != "_self_":
            is_named = (isinstance(value, list) or is_bare) and not re.search(r"\.\w+$", each)
            yield f"{each}.yaml" if is_named else each


def _table(path: Path, content: Content, trainer: str, among: str) -> Table:
    """The trainer whose keys these are: else that of the file which names it, if there is one."""
    names = list(content.values)
    named = {table.name: table for table in tables()}
    if trainer:
        if trainer not in named:
            raise CatalogError(f"no trainer {trainer!r} is known; {nearest(trainer, named)}")
        _refuse_others(path, content, named[trainer])
        return named[trainer]
    marked = [table for table in tables() if table.marked(content.values)]
    if marked:
        return max(marked, key=lambda table: sum(map(table.weighs, names)))
    if among in named:
        return named[among]
    if content.is_script:
        return LAUNCHERS
    raise _unknown_trainer(path)


def _refuse_others(path: Path, content: Content, table: Table) -> None:
    """Refuse a file without a key of the trainer that is named for it."""
    hands_on = content.named or any(LAUNCHERS.key(n) in LAUNCHERS.includes for n in content.values)
    if hands_on or any(table.states(name) for name in content.values):
        return
    whose = [other for other in tables() if other.marked(content.values)][:1]
    words = [f"its keys are of {it.title}: give {path} or {it.name}:{path}" for it in whose]
    raise CatalogError(
        f"{path} has no key of {table.title}; {'; '.join(words or ['give another'])}"
    )


class UnknownTrainerError(CatalogError):
    """A file that no trainer is known by."""


def _unknown_trainer(path: Path) -> UnknownTrainerError:
    titles = ", ".join(table.title for table in tables())
    return UnknownTrainerError(
        f"{path}: no trainer is known by its keys; known are {titles}; --from TRAINER:FILE names"
        " one"
    )


def _last(parts: Sequence[_Part]) -> dict[tuple[str, str], tuple[Table, Key]]:
    """Keys by the table and their names in it, the last of each; those of no table, too."""
    last: dict[tuple[str, str], tuple[Table, Key]] = {}
    for part in parts:
        unset = dict.fromkeys(part.content.unset, _FLAGS)
        for name, value in (part.content.values | unset).items():
            table = part.table
            if part.content.is_script and not table.knows(name):
                table = LAUNCHERS if LAUNCHERS.knows(name) else table
                if (
                    table is not LAUNCHERS
                    and name not in unset
                    and (name[0] == "$" or not name[1:])
                ):
                    continue
            where = table.name, table.key(name)
            last.pop(where, None)
            last[where] = table, Key(str(part.path), name, value, "")
    return last


def _take(
    table: Table, entry: Key, options: dict[str, Stated], lists: Mapping[str, list[Key]]
) -> None:
    """Put a key into one of these lists, and what it says to the options."""
    key, value = table.key(entry.name), entry.value
    if value is _FLAGS:
        lists["missing"].append(replace(entry, value="?", became="flags that only a run knows"))
        return
    if value is None or value == "auto" or (key in table.includes and key not in table.take):
        return
    kind, became = "unknown", ""
    if key in table.take:
        take = table.take[key]
        become, became = _become(take, value, f"{entry.file}: {entry.name}", options)
        kind = "missing" if became else "ignored"
        earlier = options.get(take.option) if value is False else None
        if earlier and earlier.value == take.value:  # what another key has switched on
            del options[take.option]
        if become is not None:
            options[take.option] = Stated(become, entry.name, entry.file)
            kind = "taken"
            became = OPEN if isinstance(become, Unset) else _words(take.option, become)
    elif key in table.warn:
        warn = table.warn[key]
        off = value in (False, 0, "") or value in warn.fine
        kind, became = ("ignored", "") if off else ("missing", warn.effect)
    elif table.is_ignored(key) or table.is_ignored(entry.name):
        kind = "ignored"
    lists[kind].append(replace(entry, became=became))


def _sums(
    last: Mapping[tuple[str, str], tuple[Table, Key]], options: dict[str, Stated]
) -> Iterator[Key]:
    """Put what several keys state together into the options, where none does alone."""
    for table in {table.name: table for table, _ in last.values()}.values():
        for option, names in ((option, names) for option, s in table.sums.items() for names in s):
            keys = [last[table.name, name][1] for name in names if (table.name, name) in last]
            sizes = [key.value for key in keys if type(key.value) is int]
            if option not in options and len(sizes) == len(names):
                name = " + ".join(key.name for key in keys)
                options[option] = Stated(sum(sizes), name, keys[-1].file)
                yield Key(keys[-1].file, name, sum(sizes), _words(option, sum(sizes)))


_FLAGS = object()
"""The value of a variable that may be flags, and that nothing sets."""
OPEN = "open"
"""What a key becomes whose value nothing sets."""
_PLACES = {"nodes", "gpus_per_node", "tasks_per_node", "gpus"}


def _become(take: Take, value: Any, where: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """What a value is here, or why it cannot be; neither where it says nothing."""
    if take.option in _PLACES:
        count = _count(value)
        stated = {"gpus", "gpus_per_node", take.option} & options.keys()
        return count, "" if count or stated else "no number is set; give --gpus"
    if isinstance(value, Unset):
        return value, ""
    if take.option in {"parts", "splits"}:
        return len(value if isinstance(value, list) else str(value).split(",")) or None, ""
    if take.values or take.words:
        return _looked_up(take, value, where)
    if take.value is not None:
        return take.value if value is True else None, ""
    if isinstance(value, list):
        raise CatalogError(f"{where} is a list; it is one value")
    return value, ""


def _looked_up(take: Take, value: Any, where: str) -> tuple[Any, str]:
    """Among the values of a key; of several, such as "full_shard auto_wrap", the first."""
    if take.words:
        match = re.fullmatch(take.words, str(value))
        return "-".join(match.groups()) if match else None, ""
    several = value if isinstance(value, list) else [value, *re.split(r"[\s,]+", str(value))]
    texts = [text for each in several if (text := str(each).lower()) in take.by_text]
    if texts or "*" in take.values:
        become = take.by_text[(texts or "*")[0]]
        return None if become == "" else become, ""
    if take.effect or isinstance(value, list):
        return None, take.effect
    raise CatalogError(f"{where} is {value!r}; it is one of {', '.join(take.values)}")


def _count(value: Any) -> int | None:
    """Of nodes or GPUs: 8, [0, 1], gpu:8, gpu:a100:8, or the most of 1:4; None for words."""
    if isinstance(value, list):
        return len(value) or None
    if isinstance(value, str) and re.fullmatch(r"\d+,[\d,]*", value):
        return len(value.strip(",").split(","))
    last = re.fullmatch(r"(?:.*[:=-])?(\d{1,8})(?:\(.*\))?", str(value))
    return int(last[1]) or None if last and not isinstance(value, Unset | bool) else None


def _words(option: str, value: Any) -> str:
    """An option as one gives it."""
    name, _, part = option.partition(".")
    if name in {"model", "stack"} and part:
        return f"--set {option}={text_of(value)}"
    if name == "strategy":
        return f"-s {value}" if not part else f"{part}={text_of(value)} of the strategy"
    if name == "dim":
        return f"{part.replace('.', ' ')} {text_of(value)} of the model"
    options = {entry.name for entry in fields(Question)}
    if name in options:
        return f"--{name.replace('_', '-')} {text_of(value)}"
    part_of = {"nodes": "gpus", "gpus_per_node": "gpus", "tasks_per_node": "gpus"} | GIVEN_BY
    return f"{text_of(value)} for {_flag(part_of.get(name, name))}"


def lines(reading: Reading) -> Iterable[str]:
    """What was taken, what does not matter, and what does and is not counted."""
    yield f"{', '.join(reading.files)}: {reading.trainer}"
    if reading.taken:
        yield f"taken: {', '.join(f'{key.name} ({key.became})' for key in reading.taken)}"
    if reading.assumed:
        yield f"assumed, as no key says it: {', '.join(reading.assumed)}"
    if reading.ignored:
        yield f"no matter to speed: {_few(reading.ignored)}"
    for note in reading.notes:
        yield f"warning: {note}"
    for key in reading.missing:
        yield f"warning: {key.name}={key.value} is not counted: {key.became}"
    if reading.unknown:
        yield f"warning: not known, and left out: {_few(reading.unknown)}"


def _few(keys: Sequence[Key]) -> str:
    names = list(dict.fromkeys(key.name for key in keys))
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"
