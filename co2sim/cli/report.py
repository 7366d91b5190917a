"""Tables on the terminal."""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import getdoc
from typing import Literal, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from co2sim.catalog import Fact, load_cluster, load_model, names
from co2sim.catalog.facts import Kind, facts, is_file, read
from co2sim.errors import CatalogError, nearest
from co2sim.result import Result
from co2sim.strategies import STRATEGIES, strategy_options
from co2sim.units import duration, scaled

_WIDTH = 132
"""Columns of output that goes to a file or a pipe."""


def console() -> Console:
    """The standard output, wide enough for the tables."""
    found = Console()
    fixed = found.is_terminal or "COLUMNS" in os.environ
    return found if fixed else Console(width=_WIDTH)


def print_table(
    out: Console,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
) -> None:
    """Print a plain table; the first `left` columns are texts, the others figures."""
    found = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if number < left else "right"
        found.add_column(column, justify=justify, overflow="fold", no_wrap=number >= left)
    for row in rows:
        found.add_row(*(escape(cell) for cell in row))
    out.print(escape(title), style="bold", highlight=False)
    out.print(found)
    out.print()


def print_catalog(what: str | None) -> None:
    """All names, those of one kind, or the facts of one entry or file."""
    out = console()
    kinds: tuple[Kind, ...] = get_args(Kind)
    everything: dict[str, Callable[[], None]] = {
        kind: partial(_print_names, out, kind) for kind in kinds
    }
    everything["strategies"] = partial(_print_strategies, out)
    if what is None:
        for show in everything.values():
            show()
    elif what in everything:
        everything[what]()
    elif what in STRATEGIES:
        _print_strategy(out, what)
    elif is_file(what):
        tree = read("models", what)
        kind: Kind = "clusters" if "nodes" in tree else "gpus" if "peak" in tree else "models"
        _print_entry(out, kind, what)
    else:
        found = [kind for kind in kinds if what in names(kind)]
        if not found:
            known = [*everything, *STRATEGIES, *(name for kind in kinds for name in names(kind))]
            raise CatalogError(f"nothing is called {what!r}; {nearest(what, known)}")
        for kind in found:
            _print_entry(out, kind, what)


def _print_strategies(out: Console) -> None:
    rows = []
    for name, made in STRATEGIES.items():
        options = ", ".join(option for option, _, _ in strategy_options(made))
        rows.append((name, (getdoc(made) or "").splitlines()[0], options))
    print_table(out, "strategies", ("name", "what a round does", "options"), rows, left=3)


def _print_names(out: Console, kind: Kind) -> None:
    rows = []
    for name in names(kind):
        tree = read(kind, name)
        assumed = sum(fact.assumed for fact in facts(tree))
        rows.append((name, str(tree["name"]), f"{assumed or ''}"))
    print_table(out, kind, ("name", "what it is", "assumed numbers"), rows, left=2)


def _print_strategy(out: Console, name: str) -> None:
    made = STRATEGIES[name]
    rows = strategy_options(made)
    out.print(f"{name}: {getdoc(made)}\n", highlight=False, markup=False)
    print_table(out, "options", ("option", "default", "allowed"), rows, left=3)


def _print_entry(out: Console, kind: Kind, what: str) -> None:
    if kind == "gpus":
        entries: Iterable[Fact] = facts(read(kind, what))
    else:
        entries = (load_cluster if kind == "clusters" else load_model)(what).facts
    rows = [(f.path, f.value, "assumed" if f.assumed else "", f.source) for f in entries]
    title = f"{what}: {read(kind, what).get('name', '')}"
    print_table(out, title, ("number", "value", "", "source"), rows, left=4)


def print_result(result: Result, *, measured: bool = False) -> None:
    """All figures of one configuration, simulated or measured."""
    out = console()
    r = result
    batch = f"micro-batch {r.micro_batch}" + (f" x {r.accumulation}" if r.accumulation > 1 else "")
    where = f"{r.gpus} GPUs on {r.nodes} nodes of {escape(r.cluster)}"
    out.print(f"[bold]{escape(r.strategy)}[/] on {where}")
    batch += f": {r.tokens_per_gpu_per_step:,} {r.unit}s per GPU and step"
    out.print(f"{escape(r.model)}, {batch}, {r.precision}\n", highlight=False)
    overlap = "no communication" if r.overlap_ratio is None else f"{r.overlap_ratio:.1%}"
    steps = f" ({r.steps_per_round} steps)" if r.steps_per_round > 1 else ""
    rows = [
        ("round time", duration(r.round_time_s) + steps),
        ("step time", duration(r.step_time_s)),
        (f"{r.unit}s/s", f"{r.tokens_per_s:,.0f}"),
        (f"{r.unit}s/s per GPU", f"{r.tokens_per_s_per_gpu:,.1f}"),
        ("model TFLOP/s per GPU", f"{r.model_tflops_per_gpu:.1f}"),
        ("hardware TFLOP/s per GPU", f"{r.hardware_tflops_per_gpu:.1f}"),
        ("MFU", f"{r.mfu:.1%}"),
        ("communication busy, per round", duration(r.comm_busy_s)),
        (
            "communication exposed, per round",
            f"{duration(r.exposed_comm_s)} ({r.exposed_share:.1%})",
        ),
        ("overlap ratio", overlap),
        ("sent per GPU and step", scaled(r.wire_bytes_per_gpu_per_step, "B")),
        ("sent per node's NICs and step", scaled(r.nic_bytes_per_node_per_step, "B")),
    ]
    if r.waiting_s:
        rows.insert(9, ("waiting for slower ranks, per round", duration(r.waiting_s)))
    if r.wan_bytes_per_site_per_step:
        rows.append(
            ("sent per site over the WAN and step", scaled(r.wan_bytes_per_site_per_step, "B"))
        )
    if r.usd_per_billion_tokens is not None:
        rows.append((f"USD per billion {r.unit}s", f"{r.usd_per_billion_tokens:,.2f}"))
    print_table(out, "figures", ("figure", "value"), rows)
    if measured:
        out.print(f"measured: averages over the last of {r.rounds_simulated} rounds")
    elif not r.steady:
        out.print(f"not a steady state: averaged over the last of {r.rounds_simulated} rounds")
    breakdown = [(name, duration(value)) for name, value in r.breakdown_s.items()]
    print_table(
        out,
        "spans of the last round on one rank, by work (overlapping, waiting included)",
        ("work", "time"),
        breakdown,
    )
    memory = [(name, scaled(value, "B")) for name, value in r.memory_bytes_per_gpu.items()]
    fits = "fits" if r.fits_in_memory else "DOES NOT FIT"
    title = f"memory per GPU: {fits} in {scaled(r.gpu_memory_bytes, 'B')}"
    print_table(out, title, ("item", "size"), memory)
    print_assumed(out, [result])


def print_assumed(out: Console, results: Iterable[Result]) -> None:
    """The inputs that no source supports, once each."""
    found = dict.fromkeys(fact for result in results for fact in result.assumed)
    if found:
        rows = [(fact.path, fact.value, fact.source.removeprefix("assumed: ")) for fact in found]
        print_table(
            out, "assumed, not measured or published", ("number", "value", "why"), rows, left=3
        )
