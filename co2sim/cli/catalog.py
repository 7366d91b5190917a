"""`co2sim list`."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import getdoc
from typing import Annotated, get_args

import typer
from rich.console import Console

from co2sim.catalog import Fact, load_cluster, load_model, names
from co2sim.catalog.facts import (
    Kind,
    Rate,
    RateKind,
    facts,
    is_file,
    is_source,
    key_of,
    rates,
    read,
)
from co2sim.common.errors import CatalogError, nearest
from co2sim.common.tables import console, print_lines, print_table
from co2sim.strategies import STRATEGIES, option_range, strategy_options
from co2sim.trainers.tables import Table, tables

_KEYS: Mapping[Kind, set[str]] = {
    "stacks": {"flash"},
    "optimizers": {"moments"},
    "clusters": {"nodes"},
    "gpus": {"peak"},
    "failures": {"gpu", "node", "switch", "job"},
}
"""Any of which shows what a file is of; else it is a model."""


def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            help="clusters, gpus, models, stacks, optimizers, failures, strategies, trainers,"
            " prices, grids, nodes, electricity, ownership, or one name from them."
        ),
    ] = None,
) -> None:
    """List what the catalog holds, or every number of one entry with its source."""
    out = console()
    kinds: tuple[Kind, ...] = get_args(Kind)
    everything: dict[str, Callable[[], None]] = {
        kind: partial(_print_names, out, kind) for kind in kinds
    }
    everything["strategies"] = partial(_print_strategies, out)
    everything["trainers"] = partial(_print_trainers, out)
    named: tuple[RateKind, ...] = get_args(RateKind)
    everything |= {kind: partial(_print_rates, out, kind) for kind in named}
    if what is None:
        for show in everything.values():
            show()
    elif what in everything:
        everything[what]()
    elif what in STRATEGIES:
        _print_strategy(out, what)
    elif what in {table.name for table in tables()}:
        _print_trainer(out, next(table for table in tables() if table.name == what))
    elif is_file(what):
        tree = {} if is_source(what) else read("models", what)
        fitting = (kind for kind, keys in _KEYS.items() if keys & tree.keys())
        _print_entry(out, next(fitting, "models"), what)
    else:
        entries = [(kind, what) for kind in kinds if what in names(kind)]
        entries = entries or [
            (kind, key) for kind in kinds if (key := key_of(kind, what)) in names(kind)
        ]
        rated = [kind for kind in named if what in rates(kind)]
        for one in rated:
            _print_rates(out, one, what)
        if not entries and not rated:
            every = [*everything, *STRATEGIES, *(table.name for table in tables())]
            every += [name for kind in kinds for name in names(kind)]
            every += [name for one in named for name in rates(one)]
            raise CatalogError(f"nothing is called {what!r}; {nearest(what, every)}")
        for kind, key in entries:
            _print_entry(out, kind, key)


def _print_strategies(out: Console) -> None:
    rows = []
    for name, made in STRATEGIES.items():
        options = ", ".join(option for option, _, _ in strategy_options(made))
        rows.append((name, (getdoc(made) or "").splitlines()[0], options))
    print_table(out, "strategies", ("name", "what a round does", "options"), rows, left=3)


def _print_trainers(out: Console) -> None:
    rows = [(table.name, table.title, table.stack, f"{len(table.take)}") for table in tables()]
    print_table(
        out, "trainers, whose files --from reads", ("name", "whose", "stack", "keys"), rows, left=3
    )


def _print_trainer(out: Console, table: Table) -> None:
    """Its keys that are taken, and those that matter and cannot be."""
    rows = [(key, take.option) for key, take in table.take.items()]
    print_table(out, f"{table.title}: keys that --from takes", ("key", "option"), rows, left=2)
    effects = [(key, warn.effect) for key, warn in table.warn.items()]
    print_table(out, "and those that it cannot", ("key", "why"), effects, left=2)


def _print_names(out: Console, kind: Kind) -> None:
    rows = []
    for name in names(kind):
        tree = read(kind, name)
        assumed = sum(fact.assumed for fact in facts(tree))
        title = str(tree.get("title", tree["name"]))
        rows.append((name, title, f"{assumed or ''}"))
    print_table(out, kind, ("name", "what it is", "assumed numbers"), rows, left=2)


def _print_rates(out: Console, kind: RateKind, only: str | None = None) -> None:
    """Prices or grids, with range, date and source."""
    rows = [
        (name, rate.value, _ends(rate), _dated(kind, rate), rate.source)
        for name, rate in rates(kind).items()
        if only in {None, name}
    ]
    columns = ("name", "value", "range", "date", "source")
    print_table(out, kind, columns, rows, left=5)


def _dated(kind: RateKind, rate: Rate) -> str:
    """The date; of money it says when that is long ago."""
    return rate.date if kind == "grids" else rate.dated()


def _ends(rate: Rate) -> str:
    return f"{rate.low} to {rate.high}" if rate.low and rate.high else ""


def _print_strategy(out: Console, name: str) -> None:
    made = STRATEGIES[name]
    rows = [
        (option, default, _with_range(allowed, option_range(made, option)))
        for option, default, allowed in strategy_options(made)
    ]
    for paragraph in f"{name}: {getdoc(made)}".split("\n\n"):
        print_lines(out, " ".join(paragraph.split()), "")
    print_table(out, "options", ("option", "default", "allowed"), rows, left=3)


def _with_range(allowed: str, bounds: str) -> str:
    """Where an option is a number, its range behind it."""
    kind = next((kind for kind in ("a whole number", "a number") if kind in allowed), "")
    return allowed.replace(kind, f"{kind}, {bounds}", 1) if kind and bounds else allowed


def _print_entry(out: Console, kind: Kind, what: str) -> None:
    counted: list[tuple[str, str, str, str]] = []
    tree = {} if is_source(what) else read(kind, what)
    name = str(tree.get("title", tree.get("name", "")))
    if kind in {"gpus", "stacks", "optimizers", "failures"}:
        entries: Iterable[Fact] = facts(tree)
    elif kind == "clusters":
        entries = load_cluster(what).facts
    else:
        model = load_model(what)
        entries, name = model.facts, model.value.name
        size = f"{model.value.parameters:,}"
        counted = [("parameters", size, "", "counted from the shape")]
    rows = [(f.path, f.value, "assumed" if f.assumed else "", f.source) for f in entries]
    rows += [row for row in counted if row[0] not in {fact.path for fact in entries}]
    columns = ("number", "value", "status", "source")
    print_table(out, f"{what}: {name}" if name else what, columns, rows, left=4)
