"""Files of trainers as flat keys and values: TOML, YAML, JSON, scripts with flags, and logs."""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from co2sim.common.errors import CatalogError
from co2sim.trainers import python, shell
from co2sim.trainers.tables import LAUNCHERS, tables

Values: TypeAlias = dict[str, Any]
"""By key: nested keys are joined by dots, flags have no dashes in front and underscores inside."""

MOST_BYTES = 4 * 2**20
"""Of a file; no config is as large, and a log may be cut."""
_MOST_KEYS = 20_000
_MOST_DEPTH = 32
_MOST_ABOVE = 8
"""Of folders above a file, where others may be that it names."""
_MOST_LETTERS = 1000
"""Of the name of a file."""

_ARGUMENT = re.compile(r"^(?:\S+: ?|\[[^\]]*\]:? ?)?\s*(\w+) \.{3,} ?(.*?)\s*$")
"""A line of the arguments in a log of Megatron-LM, behind the mark of a rank, if any."""
_OPEN = re.compile(r"[$`]|\{\{|^(\?\?\?|<.*>)$")
"""Of a value that only a run knows, or that a template leaves to another program."""
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)")
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WORDS: dict[str, bool | None] = {"true": True, "True": True, "false": False, "False": False}
_WORDS |= dict.fromkeys(("null", "None", "~"))  # "none" is a word of some trainers
_REFERENCE = re.compile(r"\$\{(oc\.env:|env:)?([\w.]+)(?:[:,]-?\s*([^${}]*))?\}")
"""Of a YAML: a variable with or without a default, or another key."""
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_KEY = re.compile(r"\+{0,2}([A-Za-z]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
"""As Hydra has it: trainer.devices=8."""
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*(\[@\])?\}?")
_CONFIG = re.compile(r"[\w./-]+\.(ya?ml|toml)")
_DUMP = re.compile(r"Running with (?:configs|args): (?=\{)")
"""Before the JSON that torchtitan logs (debug.print_config, job.print_config, job.print_args)."""
_RANK = re.compile(r"^\[[^\]\n]*\]:? ?", re.MULTILINE)
"""The mark of a rank in a log."""


class Unset(str):
    """A value with a variable that neither the file nor the environment sets, such as $TP."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Content:
    """What a file says: its values; and of a script files that it names, and those that it writes.

    `is_script` says whether the values are flags, and variables behind $. `unset` are variables
    that may be flags, too, and that nothing sets. `trainings` are those that it starts, of which
    these are the values of one.
    """

    values: Values
    is_script: bool = False
    unset: Sequence[str] = ()
    named: Sequence[str] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    trainings: int = 1


def read(path: Path, text: str | None = None, part: str = "") -> Content:
    """What a file says, or its `text`.

    A `part` is a training of a script, from 1, or a function of Python. Raises CatalogError for
    what is none of these kinds.
    """
    text = _text(path) if text is None else text
    kind = path.suffix.lower()
    if kind == ".py":
        return Content(flat(_parsed(path, "config", partial(python.read, name=part), text), path))
    if kind in _PARSERS:
        if part:
            raise CatalogError(f"{path}:{part}: only a script or a file of Python has parts")
        return Content(flat(_parsed(path, *_PARSERS[kind], text), path))
    if match := _DUMP.search(text):
        dump = _RANK.sub("", text[match.end() :])
        return Content(flat(_parsed(path, "JSON", _first, dump), path))
    return _with_flags(path, text, part)


def _with_flags(path: Path, text: str, part: str) -> Content:
    """Of a script, or of a log with the arguments of Megatron-LM."""
    if arguments := dict(_arguments(text)):
        return Content(arguments, is_script=True)
    try:
        script = shell.read(text, os.environ, lambda name: _beside(path, name))
    except ValueError as error:
        raise CatalogError(f"{path} is no script: {error}") from error
    content = of_script(script, part)
    if part and not (part.isdecimal() and 1 <= int(part) <= content.trainings):
        last = content.trainings
        raise CatalogError(f"{path}:{part}: its trainings are {path}:1 to {path}:{last}")
    if any(not key.startswith("$") for key in content.values) or content.named:
        return content
    raise CatalogError(
        f"{path} has no keys: it may be TOML, YAML, JSON or Python by its name, a script with flags"
        " such as --micro-batch-size 1, or a log with the arguments of Megatron-LM or torchtitan"
    )


def _first(text: str) -> Any:
    """The JSON that a text begins with."""
    return json.JSONDecoder().raw_decode(text)[0]


def _beside(path: Path, name: str) -> str | None:
    """The text of another script, if it is here."""
    other = place(path, name, ("",)) if name else None
    return _text(other) if other else None


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise CatalogError(f"{path} is no file; give one that a trainer reads")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CatalogError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise CatalogError(f"{path} is larger than {MOST_BYTES >> 20} MiB; give its config alone")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CatalogError(f"{path} is no text in UTF-8") from error


def _yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 - only where one is read

    class Loader(yaml.SafeLoader):
        """With few keys of others in a mapping: merges of merges grow without end."""

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MOST_KEYS:
                raise ValueError(f"a mapping has more than {_MOST_KEYS:,} keys")

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{getattr(error, 'problem', None) or error}") from error


_PARSERS: Mapping[str, tuple[str, Any]] = {
    ".toml": ("TOML", tomllib.loads),
    ".json": ("JSON", json.loads),
    ".yaml": ("YAML", _yaml),
    ".yml": ("YAML", _yaml),
}


def _parsed(path: Path, kind: str, parse: Any, text: str) -> Mapping[str, Any]:
    try:
        tree = parse(text)
    except (ValueError, RecursionError) as error:
        problem = " ".join(str(error).split()) or "it is nested too deeply"
        raise CatalogError(f"{path} is no {kind}: {problem}") from error
    if not isinstance(tree, Mapping):
        raise CatalogError(f"{path} has no keys: the whole of it is {kind} of another kind")
    return tree


def flat(tree: Mapping[str, Any], path: Path) -> Values:
    """Nested keys joined by dots; lists stay values."""
    values: Values = {}

    def add(prefix: str, part: Mapping[Any, Any], depth: int) -> None:
        if depth > _MOST_DEPTH:
            raise CatalogError(f"{path} is nested more than {_MOST_DEPTH} levels deep")
        for key, value in part.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                add(f"{name}.", value, depth + 1)
            else:
                values[name] = value
            if len(values) > _MOST_KEYS:
                raise CatalogError(f"{path} has more than {_MOST_KEYS:,} keys")

    add("", tree, 0)
    return {name: typed(_referred(value, values)) for name, value in values.items()}


def _referred(value: Any, values: Mapping[str, Any]) -> Any:
    """With the value of another key, of a variable, or its default in the place of ${that}."""

    def of(match: re.Match[str]) -> str:
        kind, name, other = match.groups()
        text = os.environ.get(name) if kind or "." not in name else None
        value = text if kind else values.get(name, text)
        return str(value if value is not None else match[0] if other is None else other)

    for _ in range(_MOST_DEPTH):
        if not isinstance(value, str) or "${" not in value:
            break
        if (match := _REFERENCE.fullmatch(value)) and not match[1] and match[2] in values:
            more = values[match[2]]
        else:
            more = _REFERENCE.sub(of, value)
        if more == value or (isinstance(more, str) and len(more) > MOST_BYTES):
            break
        value = more
    return value


def _arguments(text: str) -> Iterator[tuple[str, Any]]:
    """Of the log of Megatron-LM: name ........ value."""
    for line in text.splitlines():
        if match := _ARGUMENT.match(line):
            yield match[1], typed(match[2])


def of_script(script: shell.Script, part: str = "") -> Content:
    """Its flags: those of #SBATCH first, then variables behind $, then those of commands.

    Flags that wait in variables count where no command has one of them. Of several trainings that
    of the `part` counts, or the first: what follows evaluates it, exports it, or is another one.
    """
    trainings, others = _trainings(script.commands)
    chosen = trainings[min(int(part), len(trainings)) - 1 if part.isdecimal() else 0 :][:1]
    names: list[str] = []
    commands, aside = _flags([*others, *chosen], names), _flags(script.aside, names)
    values = _flags([script.batch], [])
    set_here = {f"${name}": typed(text) for name, text in script.variables.items() if text}
    values |= {name: value for name, value in set_here.items() if not isinstance(value, Unset)}
    values |= commands if commands.keys() & aside.keys() else aside | commands
    words = {word for command in (*others, *chosen) for word in command}
    unset = {word for word in words if re.fullmatch(r"\$\{?[A-Za-z_]\w*(\[@\])?\}?", word)}
    unset -= {str(value) for value in values.values()}
    return Content(
        values,
        is_script=True,
        unset=sorted(unset),
        named=names,
        written=script.documents,
        trainings=max(len(trainings), 1),
    )


def _trainings(commands: Sequence[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Commands that start trainings, each once, and the others."""
    trainings: list[list[str]] = []
    others: list[list[str]] = []
    for words in commands:
        line = f" {' '.join(word.rpartition('/')[2] for word in words)}"
        starts = " pip " not in line and any(f" {start} " in line for start in LAUNCHERS.starts)
        if starts or any(table.marked(_flags([words], [])) for table in tables()):
            trainings += [words] * (words not in trainings)
        else:
            others.append(words)
    return trainings, others


def _flags(commands: Sequence[Sequence[str]], named: list[str]) -> Values:
    """Flags with the first of their values, and keys of Hydra.

    `named` gets the files of keys that the last command names which names some.
    """
    values: Values = {}
    for words in commands:
        files = list(_flags_of(words, values))
        named[:] = files or named
    return values


def _flags_of(words: Sequence[str], values: Values) -> Iterator[str]:
    """Put those of a command into `values`; yields the files of keys that it names."""
    name, some = "", list[str]()
    for word in [*words, "--"]:
        key = _KEY.fullmatch(word)
        if word != "--" and not key and not _FLAG.fullmatch(word):
            is_handed_on = not name or some or name in LAUNCHERS.hands_on
            if is_handed_on and _CONFIG.fullmatch(word):
                yield word
            some.append(word)
            continue
        if name and not some and ".no_" in name:  # as tyro has it: --checkpoint.no-enable
            values[name.replace(".no_", ".")] = False
        elif name:
            values[name] = _value(some)
        name, some = "", []
        if key:
            values[key[1]] = typed(key[2])
        elif word != "--":
            head, separator, value = word.partition("=")
            name, some = key_of(head), [value] if separator else []


def key_of(flag: str) -> str:
    """The key of a flag: --micro-batch-size is micro_batch_size."""
    return flag.lstrip("-").replace("-", "_")


def _value(words: Sequence[str]) -> Any:
    return typed(words[0]) if words else True


def typed(value: Any) -> Any:
    """Texts of numbers and of truth values as such."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if _OPEN.search(text):
        return Unset(text)
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return int(text) if len(text) <= 18 else text  # noqa: PLR2004 - an index of 64 bits
    return float(text) if _REAL.fullmatch(text) else text


def place(path: Path, name: str, places: Sequence[str]) -> Path | None:
    """A file beside another one, or in a folder above, as scripts run in the folder of all."""
    if "$" in name or "\0" in name or len(name) > _MOST_LETTERS:
        return None
    folders = (path.parent, *path.absolute().parents[1 : _MOST_ABOVE + 1])
    files = (folder / below / name for folder in folders for below in places)
    return next((file for file in files if file.is_file() and file != path), None)
