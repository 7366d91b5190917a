"""The first screens of `co2sim run`, `scale` and `sweep`: one case, or several beside each other."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from co2sim.catalog.facts import rates
from co2sim.common.tables import console
from co2sim.common.units import counted, duration, number, scaled
from co2sim.hardware.cluster import GPU
from co2sim.prediction import figures, notes
from co2sim.prediction.figures import INTERVAL
from co2sim.prediction.intervals import nearest, published_runs, shares, undecided
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, scale_of, step_factor
from co2sim.prediction.totals import Totals
from co2sim.report.text import totals
from co2sim.report.text.result import as_taken, first_of, fit, fitting, speeds
from co2sim.report.text.screen import WIDTH, Screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A case, its result, and what it takes to train the tokens that were asked for, if any.

    `name` is what an answer calls it, such as "co2(48,node) on 64 GPUs".
    """

    name: str
    case: Question
    result: Result
    totals: Totals | None = None


# --- names ----------------------------------------------------------------------------------------

_SHORT = 18
"""Characters of a strategy that is not shortened."""
_OPTIONS = 2
"""Options of a strategy that its label has, unless more tell it from others."""


def labels(titles: Iterable[str]) -> dict[str, str]:
    """Short names of strategies: `co2(48,node)` for `co2(tau=48, worker=node, inner=zero2)`.

    Options that tell strategies of one name apart are there, and the first ones besides.
    """
    every = list(dict.fromkeys(titles))
    short = {title: title if len(title) <= _SHORT else _label(title, every) for title in every}
    taken = list(short.values())
    return {title: label if taken.count(label) == 1 else title for title, label in short.items()}


def _label(title: str, every: Sequence[str]) -> str:
    name, options = _options(title)
    alike = [others for other in every for head, others in [_options(other)] if head == name]
    telling = {key for key in options if any(o.get(key) != options[key] for o in alike)}
    rest = [key for key in options if key not in telling][: max(0, _OPTIONS - len(telling))]
    shown = [_value(key, options[key]) for key in options if key in telling or key in rest]
    return f"{name}({','.join(shown)})"


def _options(title: str) -> tuple[str, dict[str, str]]:
    name, _, inside = title.removesuffix(")").partition("(")
    pairs = (option.partition("=") for option in inside.split(", ") if option)
    return name, {key: value for key, _, value in pairs}


def _value(key: str, value: str) -> str:
    return {"true": key, "false": f"no-{key}"}.get(value, value)


def legend(names: Mapping[str, str]) -> list[str]:
    """One line on the labels that are not the whole title; nothing where all are."""
    short = [f"{label}: {title}" for title, label in names.items() if label != title]
    return [f"({'; '.join(short)})"] if short else []


# --- one case -------------------------------------------------------------------------------------


def of_one(
    entry: Simulated,
    settle: Callable[[Question], Question],
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
    verdict: str = "",
) -> Screen:
    """The screen of one case; `settle` gives a case numbers for what it leaves open.

    `verdict` is what is said of a local-update method.
    """
    r = entry.result
    answer = [_first(entry, tokens), "; ".join(filter(None, [r.place, _setup([r])]))]
    rows = [
        ("cost", _cost([entry], entry, tokens, goal)),
        ("speed", _speed(r, tokens)),
        ("memory", memory(r)),
        *([("", _instead(entry, settle))] if not r.fits_in_memory else []),
        *_warnings([entry]),
        ("batch", _batch([r])),
        *([("learning", verdict)] if verdict else _learning([r], goal)),
        ("counted", _counted([entry])),
        *_shared_rows(entry, [entry]),
        *(("note", note) for note in _own_notes(r)),
    ]
    return Screen(answer=answer, rows=rows)


def _first(entry: Simulated, tokens: float | None) -> str:
    """Days and money where tokens are asked for, else the speed; first what does not fit."""
    r = entry.result
    before = "" if r.fits_in_memory else f"{r.misfit} in memory. If it does: "
    if tokens is not None and entry.totals is None:
        said = f"{entry.name} trains {r.model}; what its steps are worth is not known: give"
        return f"{before}{said} --steps-factor."
    if entry.totals is not None:
        in_short = totals.in_short(entry.totals, r.unit, factor=False)
        return f"{before}{entry.name} trains {r.model} on {in_short}."
    return (
        f"{before}{entry.name} trains {r.model} at {r.tokens_per_s:,.0f} {r.unit}s/s{_ends(r)},"
        f" {duration(r.step_time_s)} a step."
    )


def _ends(r: Result) -> str:
    if r.tokens_per_s_low is None or r.tokens_per_s_high is None:
        return ""
    return f" (90 %: {r.tokens_per_s_low:,.0f} to {r.tokens_per_s_high:,.0f})"


def _setup(results: Sequence[Result]) -> str:
    """What results share besides the cluster: how GPUs divide the model, and the stack."""
    said = dict.fromkeys(r.division for r in results if r.division)
    return "; ".join([*said, *dict.fromkeys(r.stack for r in results if r.stack)])


def _speed(r: Result, tokens: float | None) -> str:
    """Units a second and what they are made of; what the answer says already is left out."""
    made_of = f"MFU {r.mfu:.1%}, {r.exposed_share:.1%} exposed communication"
    each = number(r.tokens_per_s_per_gpu)
    if tokens is None:
        return f"{each} {r.unit}s/s a GPU, {made_of}"
    low, high = r.tokens_per_s_low, r.tokens_per_s_high
    ends = "" if low is None or high is None else f" ({low:,.0f} to {high:,.0f})"
    step = f"step {duration(r.step_time_s)}"
    return f"{r.tokens_per_s:,.0f} {r.unit}s/s{ends}, {each} a GPU, {step}, {made_of}"


def memory(r: Result) -> str:
    """Whether it fits in a GPU, in the words of all answers, and how much it needs."""
    size, room = scaled(r.memory_bytes_per_gpu["total"], "B"), scaled(r.gpu_memory_bytes, "B")
    text = f"{fit(r)}: {size} of the {room} of a GPU"
    if r.memory_bytes_low is not None and r.memory_bytes_high is not None:
        ends = scaled(r.memory_bytes_low, "B"), scaled(r.memory_bytes_high, "B")
        text += f" (90 %: {ends[0]} to {ends[1]})"
    return text


_INSTEAD = 3
"""Changes that are named where a case does not fit."""


def _instead(entry: Simulated, settle: Callable[[Question], Question]) -> str:
    lines, heading, rows = fitting(as_taken(entry.case, entry.result), settle)
    if not rows:
        return lines[0]
    shown = (f"{what} ({size})" for what, size in rows[:_INSTEAD])
    return f"{heading.partition(' (')[0]}: {', or '.join(shown)}"


# --- rows -----------------------------------------------------------------------------------------


def _cost(
    entries: Sequence[Simulated], best: Simulated, tokens: float | None, goal: Goal
) -> str:
    """The price, what else is spent, or how to give what is missing."""
    r, total = best.result, best.totals
    price = totals.values_of([entry.case for entry in entries], "price_per_gpu")
    if tokens is None:
        said = [f"{what}: {value}" for what, value in totals.loss_rows(r, goal)]
        if r.cost_per_billion_tokens is not None:
            each = f"{r.cost_per_billion_tokens:,.2f} {r.currency} for a billion {r.unit}s"
            said += [f"{each}, at {price} a GPU"]
        else:
            said += [_no_price(best.case)]
        return "; ".join([*said, "--tokens 1T gives days and money"])
    if total is None:
        return "not known, as the worth of its steps is not"
    spent = [f"{total.gpu_hours:,.0f} GPU-hours"]
    spent += [f"at {price} a GPU"] if total.cost is not None else []
    for name, thousands in (("energy_kwh", "MWh"), ("co2e_kg", "t CO2e")):
        if (value := getattr(total, name)) is not None:
            spent.append(f"{totals.amount(value / 1000)} {thousands}")
    text = ", ".join(spent)
    return text if total.cost is not None else f"{text}; {_no_price(best.case)}"


def _no_price(case: Question) -> str:
    """How to give a price: one of the catalog for this GPU, with its date."""
    prices = _prices(case.load()[0].value.gpu)
    if not prices:
        return "no price is known: --set price_per_gpu='2.5 USD/h', say"
    name, value, date = prices[0]
    return f"no price is given: --set price_per_gpu={name} is {value} ({date}), or yours"


_OF_GPU = re.compile(r"([a-z]+\d+)(?:-(\d+)(?=-))?")
"""The GPU of a price, and its memory, with which its name begins: a100-80-aws-2026-11."""


def _prices(gpu: GPU) -> list[tuple[str, str, str]]:
    """Prices of the catalog for a GPU, with their dates: medians first, then the newest."""
    words = re.split(r"[ ,-]+", gpu.name.lower())
    alike = [
        rate
        for rate in rates("prices").values()
        if (of := _OF_GPU.match(rate.name)) and of[1] in words[:2]
        if of[2] is None or f"{of[2]}gb" in words
    ]
    alike.sort(key=lambda rate: ("median" in rate.name, rate.date), reverse=True)
    return [(rate.name, rate.value, rate.date) for rate in alike]


def _batch(results: Sequence[Result]) -> str:
    """The global batch and where it is from, and how GPUs take it."""
    first = results[0]
    sources = [
        note.removeprefix(notes.BATCH_OF).partition(" (")[0]
        for note in notes.alike(r.notes for r in results)
        if note.startswith(notes.BATCH_OF)
    ]
    whole = figures.shared_batch(results) + (f" ({sources[0]})" if sources else "")
    shared = [first.precision] if len({r.precision for r in results}) == 1 else []
    shared += [first.optimizer] if first.optimizer != "adamw" else []
    shared += [f"adapters of rank {first.lora}"] if first.lora else []
    rest = "".join(f", {word}" for word in shared)
    taken = {figures.brief_batch(r) for r in results}
    if len(taken) > 1:
        return f"{whole}; micro-batches or recomputation differ{rest}"
    steps = f" x {counted(first.accumulation, 'micro-step')}" if first.accumulation > 1 else ""
    again = f"recompute {first.recompute}" if first.recompute != "none" else "no recomputation"
    return f"{whole}; micro-batch {first.micro_batch}{steps}, {again}{rest}"


def _learning(results: Sequence[Result], goal: Goal) -> list[tuple[str, str]]:
    """How many steps local updates need for one of ddp."""
    every = {
        r.strategy: factor
        for r in results
        if (factor := step_factor(r.strategy, scale_of(r), goal)) is None or factor.factor != 1
    }
    names = labels(r.strategy for r in results)
    said = [
        f"{names[title]} needs {'an unknown number of' if factor is None else factor} steps"
        for title, factor in every.items()
    ]
    return [("learning", f"{'; '.join(said)} for one of ddp, to the same loss")] if said else []


def _counted(entries: Sequence[Simulated]) -> str:
    """What the answer counts, and what it does not."""
    results, trained = [e.result for e in entries], [e.totals for e in entries if e.totals]
    noise = entries[0].case.noise
    counted_ = ["communication", "uneven nodes"] if results[0].nodes > 1 else ["communication"]
    counted_ += [speeds(noise)] if noise.uneven else []
    lacking = ["learning", "loading of data"]
    shares_ = {total.goodput for total in trained}
    if shares_ - {1.0}:
        least, most = min(shares_), max(shares_)
        share = f"{least:.1%}" if least == most else f"{least:.1%} to {most:.1%}"
        counted_.append(f"failures ({share} of the time is useful)")
    else:
        lacking.insert(0, "failures (--set failures=meta-rsc-1)")
    if any(total.energy_kwh is not None for total in trained):
        counted_.append("energy with cooling")
    paths = {fact.path for r in results for fact in r.assumed}
    assumed = f"; {len(paths)} inputs assumed" if paths else ""
    return f"{', '.join(counted_)}; not: {', '.join(lacking)}{assumed}"


def _warnings(entries: Sequence[Simulated]) -> list[tuple[str, str]]:
    """What holds a case back: the first of each kind, and how many more there are."""
    kinds: dict[str, list[str]] = {}
    for entry in entries:
        name = f"{entry.name}: " if len(entries) > 1 else ""
        unsteady = [] if entry.result.steady else ["not a steady state: more --rounds"]
        for text in (*entry.result.warnings, *unsteady):
            kinds.setdefault(re.sub(r"[0-9][0-9.,]*", "", text), []).append(f"{name}{text}")
    return [
        ("warning", f"{said[0]}{f' (and {len(said) - 1} like it)' if len(said) > 1 else ''}")
        for said in kinds.values()
    ]


def _shared_rows(best: Simulated, entries: Sequence[Simulated]) -> list[tuple[str, str]]:
    """What the stack has not, and how far off predictions of its kind were."""
    shared = notes.alike(entry.result.notes for entry in entries)
    lacks = [note.removeprefix(notes.WHAT_IF) for note in shared if note.startswith(notes.WHAT_IF)]
    rows = [("what-if", "; ".join(lacks))] if lacks else []
    return rows + [("like it", text) for text in _like_it(best.case, best.result)]


_SHARED = {
    "nothing": "that divide no states",
    "states": "with divided optimizer states",
    "parameters": "with divided parameters",
}
"""Published runs by what their replicas share."""


def _like_it(case: Question, r: Result) -> list[str]:
    """The nearest published run, and how far off predictions of such runs were."""
    if r.nearest_published is None:
        return [f"{INTERVAL}: {r.interval_source}"] if r.interval_source else []
    run = nearest(case, r, 1)[0].run
    far = "no published run is near this one: test it first; the nearest is " * r.unlike_published
    text = (
        f"{far}{run.model} on {run.gpus:,} {run.gpu} with {run.strategy}: published"
        f" {run.published:,.0f} tokens/s a GPU, predicted {run.predicted:,.0f}"
    )
    kind = shares(r.strategy)
    alike = [abs(run.error) for run in published_runs() if run.shares == kind]
    if kind in _SHARED and alike:
        mean = sum(alike) / len(alike)
        text += f"; {counted(len(alike), 'published run')} {_SHARED[kind]}: {mean:.0%} off"
    about = [note for note in r.notes if note in notes.HOW_FAR_OFF]
    return [text, *about]


def _own_notes(r: Result) -> list[str]:
    """What else is said of a result: what was chosen for it first."""
    told = (*notes.HOW_FAR_OFF, notes.FASTEST)
    beside = [
        note
        for note in notes.alike([r.notes])
        if note not in told and not note.startswith((notes.BATCH_OF, notes.WHAT_IF))
    ]
    return [*notes.own(r.notes), *beside]


# --- several cases --------------------------------------------------------------------------------


def of_several(
    entries: Sequence[Simulated],
    named: tuple[Sequence[str], Sequence[Sequence[str]]],
    where: str,
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
    *,
    said: Sequence[tuple[str, str]] = (),
    key: Sequence[str] = (),
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None,
) -> Screen:
    """The screen of several cases, with a row of the table for each.

    `named` are the columns that name a case, and their cells; `where` says what all share. `said`
    are rows of a command, `key` its legend. `table` stands in place of a row for each case.
    """
    best = best_of(entries)
    columns, rows = table or _table(entries, named, goal, tokens)
    results = [entry.result for entry in entries]
    learning = [row for row in said if row[0] == "learning"] or _learning(results, goal)
    return Screen(
        answer=[*_best(entries, best, tokens), "; ".join(filter(None, [where, _setup(results)]))],
        columns=columns,
        table=rows,
        left=len(named[0]),
        legend=key,
        rows=[
            ("cost", _cost(entries, best, tokens, goal)),
            *_warnings(entries),
            *learning,
            ("batch", _batch(results)),
            ("counted", _counted(entries)),
            *(row for row in said if row not in learning),
            *_shared_rows(best, entries),
        ],
    )


def best_of(entries: Sequence[Simulated]) -> Simulated:
    """What the answer names first: the best trade of what fits, or the fastest."""
    chosen = totals.chosen([(e.name, e.result, e.totals) for e in entries])
    if chosen:
        name = next(iter(chosen.values()))[0]
        return next(entry for entry in entries if entry.name == name)
    return max(entries, key=lambda e: (e.result.fits_in_memory, e.result.tokens_per_s))


def pace(entry: Simulated) -> tuple[bool, float, float]:
    """What tells which of several comes first: whether it fits, its days or its speed."""
    days = 0.0 if entry.totals is None else 1 / entry.totals.days
    return entry.result.fits_in_memory, days, entry.result.tokens_per_s


def _best(
    entries: Sequence[Simulated], best: Simulated, tokens: float | None
) -> list[str]:
    """The best of several, a sentence each, and which may be as good."""
    trainings = [(entry.name, entry.result, entry.totals) for entry in entries]
    r = best.result
    if tokens is not None:
        said = totals.in_brief(trainings, factor=False)
    elif r.fits_in_memory:
        said = [f"Fastest: {best.name}, {r.tokens_per_s:,.0f} {r.unit}s/s{_ends(r)}."]
    else:
        said = [f"None of these fits in memory; the fastest is {best.name}."]
    open_ = [entry.name for entry in entries if entry is not best and _undecided(best, entry)]
    return [*said, *([f"Undecided: {first_of(open_, _NAMED)} may be as good."] if open_ else [])]


_NAMED = 3
"""Cases that are named."""


def _undecided(best: Simulated, other: Simulated) -> bool:
    """Whether another one, on as many GPUs, may be as good: its days or its speed."""
    if not other.result.fits_in_memory or best.result.gpus != other.result.gpus:
        return False
    if best.totals is None or other.totals is None:
        return best.totals is other.totals and undecided(best.result, other.result)
    if best.totals.factor.certain and other.totals.factor.certain:
        return undecided(best.result, other.result)
    least, most = other.totals.days_low, best.totals.days_high
    return least is not None and most is not None and least <= most


def _table(
    entries: Sequence[Simulated],
    named: tuple[Sequence[str], Sequence[Sequence[str]]],
    goal: Goal,
    tokens: float | None,
) -> tuple[list[str], list[list[str]]]:
    """A row for each case: how long and how much, or how fast; exposed; memory."""
    first = entries[0].result
    heads = totals.heads([entry.result for entry in entries], goal)
    columns = [*named[0], *_spent_heads(entries, tokens), *heads]
    columns += [f"{first.unit}s/s", *(["90 %"] if tokens is None else [])]
    columns += [*(["step"] if tokens is None else []), "exposed", "memory", ""]
    rows = []
    for cells, entry in zip(named[1], entries, strict=True):
        r = entry.result
        to_loss = totals.cells(r, goal)[: len(heads)] if heads else []
        speed = [f"{r.tokens_per_s:,.0f}", *([figures.ends(r)] if tokens is None else [])]
        step = [duration(r.step_time_s)] if tokens is None else []
        size = scaled(r.memory_bytes_per_gpu["total"], "B")
        spent = _spent(entry, entries, tokens)
        rows.append(
            [*cells, *spent, *to_loss, *speed, *step, f"{r.exposed_share:.1%}", size, fit(r)]
        )
    return columns, rows


def _spent_heads(entries: Sequence[Simulated], tokens: float | None) -> list[str]:
    if tokens is None:
        return []
    return ["days (90 %)", _money(entries)]


def _money(entries: Sequence[Simulated]) -> str:
    """The currency, or GPU-hours where a price is missing."""
    trained = [entry.totals for entry in entries if entry.totals]
    currencies = {total.currency for total in trained}
    return str(*currencies) if len(currencies) == 1 and None not in currencies else "GPU-hours"


def _spent(
    entry: Simulated, entries: Sequence[Simulated], tokens: float | None
) -> list[str]:
    """Days and money of a row, under `_spent_heads`."""
    if tokens is None:
        return []
    if entry.totals is None:
        return ["-", "-"]
    hours = _money(entries) == "GPU-hours"
    money = entry.totals.gpu_hours if hours else entry.totals.cost
    return [totals.ranged(entry.totals, "days"), f"{money:,.0f}"]


def of_counts(
    entries: Sequence[Simulated],
    named: tuple[Sequence[str], Sequence[Sequence[str]]],
    tokens: float | None,
) -> tuple[list[str], list[list[str]], str]:
    """A table with a column for each number of GPUs, in one piece, and what it has there.

    `named` names the rows, with the same cells where they are one. The columns behind the counts
    are of the largest one of a row. Where there is no room counts in the middle are left out.
    """
    by_row: dict[tuple[str, ...], dict[int, Simulated]] = {}
    for cells, entry in zip(named[1], entries, strict=True):
        by_row.setdefault(tuple(cells), {})[entry.result.gpus] = entry
    sizes = sorted({entry.result.gpus for entry in entries})
    unit = entries[0].result.unit
    room = min(console().width, WIDTH)
    while True:
        columns = [*named[0], *(f"{size:,}" for size in sizes), "90 %"]
        columns += [*([_money(entries)] if tokens else []), "exposed", "memory"]
        rows = [
            [
                *cells,
                *(_at(row.get(size), tokens) for size in sizes),
                *_largest(row[max(row)], entries, tokens),
            ]
            for cells, row in by_row.items()
        ]
        if len(sizes) <= _FEWEST or _width(columns, rows) <= room:
            break
        del sizes[len(sizes) // 2]
    what = "days" if tokens else f"{unit}s/s of a GPU"
    return columns, rows, f"({what} by number of GPUs; the columns behind are of the most GPUs)"


_FEWEST = 2
"""Numbers of GPUs that a table has at least."""


def _at(entry: Simulated | None, tokens: float | None) -> str:
    """Days, or speed of a GPU, with some number of GPUs."""
    if entry is None:
        return ""
    if not entry.result.fits_in_memory:
        return "no fit"
    if tokens is None:
        return f"{entry.result.tokens_per_s_per_gpu:,.0f}"
    return "-" if entry.totals is None else totals.amount(entry.totals.days)


def _largest(
    entry: Simulated, entries: Sequence[Simulated], tokens: float | None
) -> list[str]:
    """What a row says of the largest number of GPUs."""
    r = entry.result
    exposed = f"{r.exposed_share:.0%}"
    if tokens is None:
        low, high = r.tokens_per_s_low, r.tokens_per_s_high
        ends = "-" if low is None or high is None else f"{low / r.gpus:,.0f} to {high / r.gpus:,.0f}"
        return [ends, exposed, fit(r)]
    if entry.totals is None:
        return ["-", "-", exposed, fit(r)]
    ends = totals.ranged(entry.totals, "days").partition("(")[2].removesuffix(")") or "-"
    return [ends, _spent(entry, entries, tokens)[1], exposed, fit(r)]


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Of a table whose cells are whole, with one column between them."""
    widths = [
        max(max(map(cell_len, head.split()), default=0), *map(cell_len, cells))
        for head, *cells in zip(columns, *rows, strict=True)
    ]
    return sum(widths) + len(widths) - 1
