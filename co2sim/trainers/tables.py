"""What the keys of each trainer are here: tables, as data."""

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

_HERE = resources.files("co2sim.trainers")


@dataclass(frozen=True, slots=True)
class Take:
    """What a key is here.

    `option` is one of a question, or a part of one (`reading`). A value is looked up in `values`
    where there are some, whatever its capitals, that of "*" being any other; one that is not there
    has the `effect`, and is a mistake where that is empty. A flag that is true stands for `value`
    where there is one. Of a text with `words`, groups of a regular expression, these are taken, and
    of another one nothing. Without any of these the value is taken as it is.
    """

    option: str
    values: Mapping[str, Any] = field(default_factory=dict)
    value: Any = None
    effect: str = ""
    words: str = ""

    @classmethod
    def of(cls, entry: str | Mapping[str, Any]) -> "Take":
        """From a table."""
        return cls(entry) if isinstance(entry, str) else cls(**entry)

    @property
    def by_text(self) -> Mapping[str, Any]:
        """The `values` by their texts in lower case."""
        return {text.lower(): value for text, value in self.values.items()}


@dataclass(frozen=True, slots=True)
class Warn:
    """A key that matters and cannot be expressed, unless its value is `fine`."""

    effect: str
    fine: Sequence[Any] = ()

    @classmethod
    def of(cls, entry: str | Mapping[str, Any]) -> "Warn":
        """From a table."""
        return cls(entry) if isinstance(entry, str) else cls(**entry)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a choice for one of the `stacks` with one of the `strategies` (none: all) is written.

    `keys` are written where they state something: into a `file`, JSON or YAML by its name, or as
    flags behind the `command`, with dashes inside if it has `dashes`. A flag that is true has no
    value where it is `bare`, and one that is false is left out. `beside` a key, or a key with a
    value, others are written that the trainer wants there; "=" stands for the same value. The
    variable `sites` holds the number of sites where there are several. One that is `answering` is
    written only where a file of its trainer asks.
    """

    command: str
    keys: Sequence[str]
    stacks: Sequence[str] = ()
    strategies: Sequence[str] = ()
    file: str = ""
    sites: str = ""
    answering: bool = False
    dashes: bool = False
    bare: bool = True
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def has(self, stack: Any, strategy: str) -> bool:
        """Whether it writes this choice."""
        of_stack = stack in self.stacks or not self.stacks
        return of_stack and (strategy in self.strategies or not self.strategies)

    def flag(self, key: str, value: Any) -> str:
        """A key and its value, as words of a command line; empty where that says nothing."""
        name = f"--{key.replace('_', '-') if self.dashes else key}"
        if isinstance(value, bool) and self.bare:
            return name if value else ""
        return f"{name} {shlex.quote(str(value))}"

    def text(self, values: Mapping[str, Any]) -> str:
        """Keys and values as the file, or as flags, one a line."""
        if not self.file:
            return "\n".join(filter(None, (self.flag(key, value) for key, value in values.items())))
        tree: dict[str, Any] = {}
        for key, value in values.items():
            *heads, last = key.split(".")
            node = tree
            for head in heads:
                node = node.setdefault(head, {})
            node[last] = value
        if self.file.endswith(".json"):
            return json.dumps(tree, indent=2)
        import yaml  # noqa: PLC0415 - only where one is written

        return str(yaml.safe_dump(tree, sort_keys=False)).rstrip()


@dataclass(frozen=True, slots=True)
class Table:
    """A trainer: its name, its stack, and its keys.

    `marks` are keys, or keys=values, of which a file of it has one at least. `prefixes` may stand
    before any key. `defaults` are options that it has where no key says another, `script` those of
    its flags, and `pipeline` those where there are stages of one. `includes` are keys that name
    another file, which is in one of `places` of a folder above; where it is not, an option that the
    key `opens` has to be given. `starts` are words of commands that start a training, and `implies`
    what a key with a value brings along where no other key says it. A key that is `idle` beside one
    of these keys=values says nothing. An option of `sums` is that of several keys together where
    none states it alone. Flags that `hands_on` has name a YAML or TOML, which is read
    if it is here, and those of `bare_names` one without its ending. A table that `extends` another
    one has its keys, too.
    """

    name: str
    title: str
    stack: str
    marks: Sequence[str]
    take: Mapping[str, Take]
    warn: Mapping[str, Warn]
    ignore: Sequence[str]
    defaults: Mapping[str, Any]
    prefixes: Sequence[str] = ()
    includes: Sequence[str] = ()
    places: Sequence[str] = ("",)
    opens: Mapping[str, str] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    script: Mapping[str, Any] = field(default_factory=dict)
    starts: Sequence[str] = ()
    implies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    idle: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sums: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    hands_on: Sequence[str] = ()
    bare_names: Sequence[str] = ()
    launch: Launch | None = None

    def key(self, name: str) -> str:
        """A key without what may stand before it, unless the table has it with that."""
        while not self._has(name):
            prefix = next(filter(name.startswith, self.prefixes), "")
            if not prefix:
                break
            name = name.removeprefix(prefix)
        return name

    def states(self, name: str) -> bool:
        """Whether a key matters to speed, with what may stand before it."""
        return self._has(self.key(name))

    def _has(self, key: str) -> bool:
        return key in self.take or key in self.warn or key in self.includes

    def is_ignored(self, key: str) -> bool:
        """Whether it does not matter to speed."""
        return any(fnmatchcase(key, pattern) for pattern in self.ignore)

    def knows(self, name: str) -> bool:
        """Whether a key is in the table, which says what it is here."""
        key = self.key(name)
        return self._has(key) or self.is_ignored(key) or self.is_ignored(name)

    def weighs(self, name: str) -> int:
        """How much a key speaks for this trainer: most where the table takes it."""
        return 4 if self.states(name) else int(self.knows(name))

    def marked(self, values: Mapping[str, Any]) -> bool:
        """Whether these may be the keys of a file of it."""
        keys = {self.key(name): value for name, value in values.items()}
        return any(
            fnmatchcase(key, mark) or f"{key}={value}" == mark
            for key, value in keys.items()
            for mark in self.marks
        )


@cache
def tables() -> tuple[Table, ...]:
    """All trainers."""
    return tuple(_read())


def _read() -> Iterator[Table]:
    for path in sorted((_HERE / "tables").iterdir(), key=lambda path: path.name):
        if path.name.endswith(".toml"):
            yield _of(path.name.removesuffix(".toml"), path.read_text("utf-8"))


def _of(name: str, text: str) -> Table:
    tree = tomllib.loads(text)
    launch = tree.pop("launch", None)
    if other := tree.pop("extends", None):
        base = tomllib.loads((_HERE / "tables" / f"{other}.toml").read_text("utf-8"))
        for part in ("take", "warn"):
            tree[part] = base.get(part, {}) | tree.get(part, {})
        tree["ignore"] = [*base["ignore"], *tree.get("ignore", ())]
        for part in ("includes", "opens", "sums"):
            tree.setdefault(part, base.get(part, {}))
    return Table(
        name=name,
        take={key: Take.of(entry) for key, entry in tree.pop("take").items()},
        warn={key: Warn.of(entry) for key, entry in tree.pop("warn", {}).items()},
        ignore=tree.pop("ignore", ()),
        defaults=tree.pop("defaults", {}),
        launch=Launch(**launch) if launch else None,
        **tree,
    )


LAUNCHERS = _of("launchers", (_HERE / "launchers.toml").read_text("utf-8"))
"""What torchrun, Slurm and others say of where a script runs; of no trainer."""
