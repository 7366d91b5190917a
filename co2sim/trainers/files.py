"""Files of trainers as flat keys and values: TOML, YAML, JSON, scripts with flags, and logs."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from co2sim.common.errors import CatalogError

Values: TypeAlias = dict[str, Any]
"""By key: nested keys are joined by dots, flags have no dashes in front and underscores inside."""

MOST_BYTES = 4 * 2**20
"""Of a file; no config is as large, and a log may be cut."""
_MOST_KEYS = 20_000
_MOST_DEPTH = 32

_ARGUMENT = re.compile(r"^(?:\S+: ?|\[[^\]]*\]:? ?)?\s*(\w+) \.{3,} ?(.*?)\s*$")
"""A line of the arguments in a log of Megatron-LM, behind the mark of a rank, if any."""
_ASSIGNED = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+)?(\w+)=(.*)$", re.DOTALL)
_ARRAY = re.compile(r"^[ \t]*(?:export\s+)?(\w+)\+?=\((.*?)\)[ \t]*$", re.DOTALL | re.MULTILINE)
_USED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)")
_REAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WORDS: dict[str, bool | None] = {"true": True, "True": True, "false": False, "False": False}
_WORDS |= dict.fromkeys(("null", "None", "~"))  # "none" is a word of some trainers
_MOST_ROUNDS = 8
"""Of variables that stand for others."""


class Unset(str):
    """A value with a variable that the file does not set, such as $TP."""

    __slots__ = ()


def read(path: Path) -> Values:
    """What a file says. Raises CatalogError for what is none of these kinds."""
    text = _text(path)
    kind = path.suffix.lower()
    if kind == ".toml":
        return flat(_parsed(path, "TOML", tomllib.loads, text), path)
    if kind == ".json":
        return flat(_parsed(path, "JSON", json.loads, text), path)
    if kind in {".yaml", ".yml"}:
        return flat(_parsed(path, "YAML", _yaml, text), path)
    if arguments := dict(_arguments(text)):
        return arguments
    if values := flags(text):
        return values
    raise CatalogError(
        f"{path} has no keys: it may be TOML, YAML or JSON by its name, a script with flags such as"
        " --micro-batch-size 1, or a log with the arguments of Megatron-LM"
    )


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise CatalogError(f"{path} is no file; --from takes a file that a trainer reads")
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
                values[name] = typed(value)
            if len(values) > _MOST_KEYS:
                raise CatalogError(f"{path} has more than {_MOST_KEYS:,} keys")

    add("", tree, 0)
    return values


def _arguments(text: str) -> Iterator[tuple[str, Any]]:
    """Of the log of Megatron-LM: name ........ value."""
    for line in text.splitlines():
        if match := _ARGUMENT.match(line):
            yield match[1], typed(match[2])


def flags(text: str) -> Values:
    """The flags of a script, with the variables that it sets in their places."""
    lines = re.sub(r"\\[ \t]*\n", " ", _without_comments(text))
    tokens: list[str] = []
    variables = _variables(lines)
    for line in _ARRAY.sub(lambda m: f"\n{m[2]}\n", lines).splitlines():
        if not _ASSIGNED.match(line) or "--" in line:
            tokens += _split(_filled(line, variables))
    values: Values = {}
    name, some = "", list[str]()
    for token in [*tokens, "--"]:
        if not re.match(r"--[A-Za-z]|--$|-[a-z]{1,3}$", token):
            some.append(token)
            continue
        if name:
            values[name] = _value(some)
        head, separator, value = token.partition("=")
        name, some = key_of(head), [value] if separator else []
    return values


def key_of(flag: str) -> str:
    """The key of a flag: --micro-batch-size is micro_batch_size."""
    return flag.lstrip("-").replace("-", "_")


def _value(words: Sequence[str]) -> Any:
    if not words:
        return True
    if "$" in words[0]:
        return Unset(words[0])
    return typed(words[0])


def typed(value: Any) -> Any:
    """Texts of numbers and of truth values as such."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if "$" in text or (text.startswith("<") and text.endswith(">")):
        return Unset(text)
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return int(text) if len(text) <= 18 else text  # noqa: PLR2004 - an index of 64 bits
    return float(text) if _REAL.fullmatch(text) else text


def _variables(text: str) -> dict[str, str]:
    variables = {name: " ".join(part.split()) for name, part in _ARRAY.findall(text)}
    for line in text.splitlines():
        if (match := _ASSIGNED.match(line)) and not match[2].startswith("("):
            words = _split(match[2])
            variables[match[1]] = words[0] if words else ""
    for _ in range(_MOST_ROUNDS):
        filled = {name: _filled(value, variables) for name, value in variables.items()}
        if filled == variables or any(len(value) > MOST_BYTES for value in filled.values()):
            break
        variables = filled
    return variables


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """With values in place of variables; of ${N:-8} the default where N is not set."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        text = variables.get(name)
        if text is not None and f"${name}" not in text.replace("{", ""):
            return text
        return match[0] if match[2] is None else match[2]

    return _USED.sub(value, text)


def _without_comments(text: str) -> str:
    return "\n".join(re.sub(r"(^|\s)#.*$", "", line) for line in text.splitlines())


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # quotes that end on another line
        return line.split()
