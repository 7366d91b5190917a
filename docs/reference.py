"""Pages of reference that are made from the code: commands, strategies, files, columns, catalog."""

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from inspect import getdoc
from typing import Any, get_args, get_type_hints

import typer

from co2sim.catalog import names
from co2sim.catalog.facts import Kind, RateKind, facts, rates, read
from co2sim.catalog.specs import SCANS
from co2sim.common.validation import Quantity
from co2sim.hardware.cluster import GPU, Cluster, Link
from co2sim.hardware.fabric import Fabric, Tier
from co2sim.hardware.failures import Failures, SizedFailures
from co2sim.models.transformer import Experts, Transformer
from co2sim.prediction.figures import COLUMNS
from co2sim.strategies import STRATEGIES, option_range, strategy_options
from co2sim.studies.table import sortable
from co2sim.training.stack import Stack

PROGRAMS = {"co2sim": "co2sim", "realrun": "realrun", "co2analysis": "analysis"}
"""Programs, and their packages."""
TABLES = (
    Cluster,
    GPU,
    Link,
    Fabric,
    Tier,
    Failures,
    SizedFailures,
    Stack,
    Transformer,
    Experts,
    *SCANS.values(),
)
"""What a file says, by table."""

_COMMAND = re.compile(r"^(?:\$ )?((?:co2sim|realrun|co2analysis) .*?)(?: +# .*)?$", re.MULTILINE)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of every program by its name, such as `co2sim run`."""

    def under(name: str, found: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(found, "commands", None)
        if inner is None:
            yield name, found
        for one in inner or ():
            yield from under(f"{name} {one}", inner[one])

    for program, package in PROGRAMS.items():
        app = importlib.import_module(f"{package}.cli.app").app
        yield from under(program, typer.main.get_command(app))


def examples(name: str, texts: Iterable[str]) -> list[str]:
    """What pages show of a command, the shortest first; tests execute those behind `$`."""
    lines = {line for text in texts for line in _COMMAND.findall(text)}
    return sorted((line for line in lines if _of(name, line)), key=len)


def _of(name: str, line: str) -> bool:
    """Whether a line runs a command, maybe behind `realrun lab run`."""
    words = name.split()
    return any(part.split()[: len(words)] == words for part in line.split(" -- "))


def command_page(name: str, command: Any, texts: Iterable[str]) -> str:
    """A page on a command: what it does, examples, arguments and options."""
    found = examples(name, texts)[:2]
    about = (command.help or "").split("\f")[0]
    paragraphs = "\n\n".join(" ".join(part.split()) for part in about.split("\n\n"))
    shown = "".join(f"```sh\n{line}\n```\n\n" for line in found)
    options = [_option(one) for one in command.params if not getattr(one, "hidden", False)]
    return f"# {name}\n\n{paragraphs}\n\n{shown}## Options\n\n{''.join(options)}"


def _option(one: Any) -> str:
    """A line on an option or an argument: names, value, default and help."""
    names = one.opts if one.param_type_name == "option" else [one.name]
    value = "" if getattr(one, "is_flag", False) else one.metavar
    value = one.type_descriptor.annotation.__name__ if value is None else value
    given = "" if one.default in {None, False, ""} or callable(one.default) else one.default
    notes = ["needed"] * one.required + ["repeatable"] * (one.multiple or one.nargs == -1)
    notes += [f"default `{given}`"] * bool(given)
    said = f" ({', '.join(notes)})" if notes else ""
    meaning = " ".join((one.help or "").split()).replace("<", "&lt;")
    spelled = ", ".join(f"`{name}`" for name in names)
    head = " ".join(filter(None, (spelled, value)))
    return f"- {head}{said}: {meaning}\n"


def strategies() -> str:
    """Every strategy with its options."""
    parts = []
    for name, made in STRATEGIES.items():
        rows = [
            (f"`{option}`", f"`{default}`", allowed, option_range(made, option))
            for option, default, allowed in strategy_options(made)
        ]
        parts.append(f"## {name}\n\n{getdoc(made)}\n\n")
        if rows:
            parts.append(table(("option", "default", "allowed", "range"), rows) + "\n")
    return "# Strategies and their options\n\n" + "".join(parts)


def keys() -> str:
    """Every key of the TOML files, by table."""
    parts = ["# Keys of files\n\n[Catalog and units](catalog.md) shows whole files.\n\n"]
    for kind in TABLES:
        hints = get_type_hints(kind, include_extras=True)
        rows = [(f"`{one.name}`", *_value(hints[one.name]), _default(one)) for one in fields(kind)]
        parts.append(f"## {kind.__name__}\n\n{getdoc(kind)}\n\n")
        parts.append(table(("key", "unit", "range", "default"), rows) + "\n")
    return "".join(parts)


def _value(hint: Any) -> tuple[str, str]:
    """Unit and range of a number, or what else it is."""
    for part in [hint, *get_args(hint)]:
        for one in getattr(part, "__metadata__", ()):
            if isinstance(one, Quantity):
                return one.unit or "number", one.allowed_for(one.least or 0.0)
    return re.sub(r"[\w.]+\.|typing\.", "", str(getattr(hint, "__name__", hint))), ""


def _default(one: Field[Any]) -> str:
    if one.default is MISSING:
        return "" if one.default_factory is not MISSING else "needed"
    return "none" if one.default is None else f"`{one.default}`"


def columns() -> str:
    """Every column of CSV files and data frames, with the heading of tables."""
    shown = {column: heading for heading, column in COLUMNS.items()}
    rows = [(f"`{name}`", shown.get(name, "")) for name in sortable()]
    about = (
        "Columns of `sweep --csv` and of data frames, and figures of JSON. Units are in the names."
        " `co2sim.Result` in the [API reference](api.md) says what each is."
    )
    return f"# Columns and figures\n\n{about}\n\n{table(('column', 'in tables'), rows)}"


def catalog(kind: str) -> str:
    """Every entry of a kind with every number and its source."""
    parts = [f"# Catalog: {kind}\n\n`co2sim list NAME` prints the same in a terminal.\n\n"]
    if kind in get_args(RateKind):
        rows = [
            (f"`{name}`", one.value, f"{one.low or ''} to {one.high or ''}", one.date, one.source)
            for name, one in rates(kind).items()  # type: ignore[arg-type]
        ]
        return parts[0] + table(("name", "value", "range", "date", "source"), rows)
    for name in names(kind):  # type: ignore[arg-type]
        tree: Any = read(kind, name)  # type: ignore[arg-type]
        rows = [
            (f"`{one.path}`", one.value, ("assumed: " if one.assumed else "") + one.source)
            for one in facts(tree)
        ]
        parts.append(f"## {name}\n\n{tree['name']}\n\n")
        parts.append(table(("number", "value", "source"), rows) + "\n")
    return "".join(parts)


def pages(texts: Sequence[str]) -> dict[str, str]:
    """All of them: where each stands, and what it says."""
    found = {
        f"commands/{name.replace(' ', '-')}.md": command_page(name, one, texts)
        for name, one in commands()
    }
    kinds = [*get_args(Kind), *get_args(RateKind)]
    found |= {f"catalog-{kind}.md": catalog(kind) for kind in kinds}
    return found | {
        "strategies-options.md": strategies(),
        "keys.md": keys(),
        "columns.md": columns(),
    }
