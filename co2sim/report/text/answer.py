"""The first screens of `co2sim run`, `scale` and `sweep`: one case, or several compared."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from co2sim.common.tables import console
from co2sim.common.units import duration, number, scaled
from co2sim.prediction import figures, notes
from co2sim.prediction.counted import WEEK
from co2sim.prediction.evidence import nearest, published_runs
from co2sim.prediction.figures import INTERVAL
from co2sim.prediction.intervals import undecided
from co2sim.prediction.likeness import shares
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal, StepFactor, scale_of, step_factor
from co2sim.prediction.step_memory import StepMemory
from co2sim.prediction.totals import Totals
from co2sim.prediction.whole import whole_words
from co2sim.report.text import totals
from co2sim.report.text.bill import billed
from co2sim.report.text.launch import launch_row
from co2sim.report.text.memory import fitting
from co2sim.report.text.result import adapters_of, first_of, speeds
from co2sim.report.text.screen import WIDTH, Screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A case, its result, and what it takes to train the tokens that were asked for, if any.

    `name` is what an answer calls it, such as "co2(48,node) on 64 GPUs"; `label` is what tells it
    from others on as many GPUs, `method` its strategy alone, in short.
    """

    name: str
    label: str
    method: str
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


def legend(named: Mapping[str, str], *before: str, results: Iterable[Result] = ()) -> list[str]:
    """The options of labels that are not the whole title, behind other words; none for nothing.

    Of labels with the same options only the first is there. `results` tell whether there are marks.
    """
    kinds: dict[tuple[str, ...], str] = {}
    for label, title in named.items():
        if label != title:
            name, options = _options(title)
            words = ", ".join(f"{key}={value}" for key, value in options.items())
            kinds.setdefault((name, *options), f"{label}: {words or title}")
    marks = (
        [f"{LACKS} what-if: not in the stack"] if notes.lacking(r.notes for r in results) else []
    )
    said = [*filter(None, before), *marks, *kinds.values()]
    return [f"({'; '.join(said)})"] if said else []


LACKS = "\N{DAGGER}"
"""Behind a strategy in a table, where the stack has not all of it."""


def marked(name: str, *results: Result) -> str:
    """With a mark where a stack of the results lacks the strategy."""
    return f"{name} {LACKS}" if notes.lacking(r.notes for r in results) else name


# --- one case -------------------------------------------------------------------------------------


def of_one(
    entry: Simulated,
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
    verdict: str = "",
    trainer: str = "",
) -> Screen:
    """The screen of one case; `verdict` is what is said of a local-update method."""
    r = entry.result
    answer = [f"{_first(entry, tokens)}{_far([entry])}{beyond([entry])}", setup([place(r)], [r])]
    rows = [
        ("cost", _cost([entry], entry, tokens, goal)),
        ("speed", _speed(entry, tokens)),
        ("memory", r.memory_answer),
        *([("", _instead(entry))] if not r.fits_in_memory else []),
        *_warnings([entry]),
        ("batch", batch_row([r])),
        *([("learning", verdict)] if verdict else learning_row([entry], goal)),
        ("counted", counted_row([entry], learns=bool(verdict or learning_row([entry], goal)))),
        *shared_rows(entry, [entry]),
        *(("note", note) for note in _own_notes(r)),
        *launch_row(entry.case, r, trainer),
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
        return (
            f"{before}{entry.name} trains {job(r, tokens)} in {totals.at_a_glance(entry.totals)}."
        )
    return (
        f"{before}{entry.name} trains {r.model} at {r.tokens_per_s:,.0f} {r.unit}s/s{_ends(r)},"
        f" {duration(r.step_time_s)} a step."
    )


def _ends(r: Result) -> str:
    if r.tokens_per_s_low is None or r.tokens_per_s_high is None:
        return ""
    return f" (90 %: {r.tokens_per_s_low:,.0f} to {r.tokens_per_s_high:,.0f})"


def place(r: Result) -> str:
    """The cluster with what was changed; a price has its own line."""
    name, _, changes = r.place.partition(", with ")
    kept = [text for text in changes.split(", ") if text and not text.startswith("price_per_gpu=")]
    return f"{name}, with {', '.join(kept)}" if kept else name


def job(r: Result, tokens: float | None) -> str:
    """What is trained."""
    return r.model if tokens is None else f"{totals.short(tokens)} {r.unit}s of {r.model}"


def setup(before: Sequence[str], results: Sequence[Result]) -> str:
    """Some words, how GPUs divide the model, and the stack."""
    said = [*before, *dict.fromkeys(r.division for r in results if r.division)]
    stacks = dict.fromkeys(_YEARS.sub("", r.stack) for r in results if r.stack)
    return "; ".join([*said, *stacks])


_YEARS = re.compile(r", \d{4}( to \d{4}| and later)?")
"""Behind the name of a stack."""


def _speed(entry: Simulated, tokens: float | None) -> str:
    """Units a second and what they are made of; what the answer says already is left out."""
    r, share = entry.result, _useful(entry)
    made_of = f"MFU {r.mfu:.0%}, {r.exposed_share:.0%} exposed"
    each = number(r.tokens_per_s_per_gpu * share)
    if tokens is None:
        return f"{each} {r.unit}s/s a GPU, {made_of}"
    low, high = r.tokens_per_s_low, r.tokens_per_s_high
    ends = "" if low is None or high is None else f" ({low * share:,.0f} to {high * share:,.0f})"
    whole = f"{r.tokens_per_s * share:,.0f} {r.unit}s/s{ends}"
    return f"{whole}, {each} a GPU, step {duration(r.step_time_s)}, {made_of}"


def _useful(entry: Simulated) -> float:
    """The share of the time that failures leave, as the days of the answer count it."""
    return 1.0 if entry.totals is None else entry.totals.goodput


_INSTEAD = 3
"""Changes that are named where a case does not fit."""


def _instead(entry: Simulated) -> str:
    heading, rows = fitting(StepMemory.of(entry.case, entry.result))
    shown = (f"{what} ({size})" for what, size in rows[:_INSTEAD])
    return f"{heading.partition(' (')[0]}: {', or '.join(shown)}"


# --- rows -----------------------------------------------------------------------------------------


def _cost(entries: Sequence[Simulated], best: Simulated, tokens: float | None, goal: Goal) -> str:
    """The price, what else is spent, or how to give what is missing."""
    r, total = best.result, best.totals
    price = totals.values_of([entry.case for entry in entries], "price_per_gpu")
    if tokens is None:
        said = [f"{what}: {value}" for what, value in totals.loss_rows(r, goal)]
        if r.cost_per_billion_tokens is not None:
            each = f"{r.cost_per_billion_tokens:,.2f} {r.currency} for a billion {r.unit}s"
            said += [f"{each}, at {price} a GPU"]
        else:
            said += [_NO_PRICE]
        return "; ".join([*said, "--tokens 1T gives days"])
    if total is None:
        return "not known, as the worth of its steps is not"
    offer = best.case.load()[0]
    spent = [f"{total.gpu_hours:,.0f} GPU-hours"]
    if total.cost is not None and offer.value.contract is not None:
        spent.append(f"billed {billed(total, offer)}")
    elif total.cost is not None:
        spot = offer.value.spot
        spent[0] += f" at {price}" + (f", as spot {spot:.0%} of that" if spot != 1 else "")
    for name, thousands in (("energy_kwh", "MWh"), ("co2e_kg", "t CO2e")):
        if (value := getattr(total, name)) is not None:
            spent.append(f"{totals.amount(value / 1000)} {thousands}")
    text = ", ".join(spent)
    return text if total.cost is not None else f"{text}; {_NO_PRICE}"


_NO_PRICE = "no price: --set price_per_gpu='2.5 USD/h', say"


def batch_row(results: Sequence[Result]) -> str:
    """The global batch and where it is from, and how GPUs take it."""
    first = results[0]
    sources = [
        note.removeprefix(notes.BATCH_OF).partition(" (")[0]
        for note in notes.alike(r.notes for r in results)
        if note.startswith(notes.BATCH_OF)
    ]
    source = "".join(f", {text.partition(', ')[2]}" for text in sources[:1])
    whole = f"{figures.shared_batch(results, whole=False)}{source}"
    precisions = {r.precision for r in results}
    shared = [*precisions] if len(precisions) == 1 and precisions != {"bf16"} else []
    shared += [first.optimizer] if first.optimizer != "adamw" else []
    shared += [adapters_of(first)] if first.lora else []
    rest = "".join(f", {word}" for word in shared)
    taken = {figures.brief_batch(r) for r in results}
    if len(taken) > 1:
        return f"{whole}; micro-batches or recomputation differ{rest}"
    steps = f" x {first.accumulation} steps" if first.accumulation > 1 else ""
    again = f"recompute {first.recompute}" if first.recompute != "none" else "no recomputation"
    return f"{whole}; micro-batch {first.micro_batch}{steps}, {again}{rest}"


def learning_row(entries: Sequence[Simulated], goal: Goal) -> list[tuple[str, str]]:
    """How many steps local updates need for one of ddp: of each, where it has the most GPUs."""
    factors: dict[str, StepFactor | None] = {}
    for entry in sorted(entries, key=lambda entry: entry.result.gpus):
        factors[entry.method] = step_factor(entry.result.strategy, scale_of(entry.result), goal)
    said = [
        f"{method} {'an unknown number' if factor is None else factor}"
        for method, factor in factors.items()
        if factor is None or factor.factor != 1
    ]
    text = f"steps for one of ddp, to the same loss: {', '.join(said)}"
    return [("learning", text)] if said else []


def counted_row(entries: Sequence[Simulated], *, learns: bool) -> str:
    """What the answer counts, and what it does not; whether a step learns less has its own line."""
    results, trained = [e.result for e in entries], [e.totals for e in entries if e.totals]
    noise = entries[0].case.noise
    counted_ = [speeds(noise)] if noise.uneven else ["uneven nodes"]
    lacking = [*["learning"] * (not learns), "data"]
    shares_ = {total.goodput for total in trained}
    if shares_ - {1.0}:
        least, most = min(shares_), max(shares_)
        share = f"{least:.1%}" if least == most else f"{least:.1%} to {most:.1%}"
        counted_.insert(0, f"failures ({share} useful time)")
    else:
        short = trained and max(total.days for total in trained) <= WEEK
        lacking.insert(0, "failures (few in a week)" if short else "failures")
    paths = {fact.path for r in results for fact in r.assumed}
    assumed = f"; {len(paths)} inputs assumed" if paths else ""
    return f"{', '.join(counted_)}; not: {', '.join(lacking)}{assumed}"


def _warnings(entries: Sequence[Simulated]) -> list[tuple[str, str]]:
    """What holds a case back, the first case first; of several only what would help each kind."""
    kinds: dict[str, list[str]] = {}
    for entry in entries:
        unsteady = [] if entry.result.steady else ["not a steady state: more --rounds"]
        for text in (*entry.result.warnings, *unsteady):
            told = text if len(entries) == 1 else f"{entry.method}: {text.partition(': ')[0]}"
            kinds.setdefault(_NUMBERS.sub("", text), []).append(told)
    return [
        ("warning", f"{said[0]}{f' (and {len(said) - 1} like it)' if len(said) > 1 else ''}")
        for said in kinds.values()
    ]


_NUMBERS = re.compile(r"[0-9][0-9.,]*")


def shared_rows(
    best: Simulated, entries: Sequence[Simulated], *, said: bool = False
) -> list[tuple[str, str]]:
    """What the stack has not, what one site does, how far off predictions of its kind were.

    Where it is `said`, what it has not for the best has no line besides.
    """
    like_it = _like_it(best.case, best.result)
    near = [("like it" if text is like_it[0] else "", text) for text in like_it]
    whole = whole_words(best.case, best.totals, short=True)
    lacks = [("what-if", f"{stack} has {what}") for stack, what in _lacking(entries)]
    if said and _lacking(entries) == _lacking([best]):
        lacks = []
    turns = [("turns", note) for note in best.result.notes if note.startswith(notes.ONE_SITE)]
    return [*lacks, *turns, *([("whole", whole)] if whole else []), *near]


def _lacking(entries: Sequence[Simulated]) -> list[tuple[str, str]]:
    """Stacks, each with what it has not."""
    lacks: dict[str, list[str]] = {}
    for text in notes.lacking(entry.result.notes for entry in entries):
        stack, _, what = _YEARS.sub("", text).partition(" has ")
        lacks.setdefault(stack, []).append(what)
    return [(stack, ", ".join(what)) for stack, what in lacks.items()]


def _like_it(case: Question, r: Result) -> list[str]:
    """The nearest published run, and how far off predictions of such runs were."""
    if r.nearest_published is None:
        return [f"{INTERVAL}: {r.interval_source}"] if r.interval_source else []
    near = nearest(case, r, 1)[0]
    run = near.run
    text = f"{run.model}, {run.gpus:,} {run.gpu}, {run.strategy}: {near.compared}"
    about = [note for note in r.notes if notes.is_how_far_off(note)]
    if about:
        return [text, *about]
    kind = shares(r.strategy)
    errors = [abs(run.error) for run in published_runs() if run.shares == kind]
    if errors:
        text += f"; {len(errors)} such runs: {sum(errors) / len(errors):.0%} off"
    return [text]


def _own_notes(r: Result) -> list[str]:
    """What else is said of a result: what was chosen for it first."""
    beside = [
        note
        for note in notes.alike([r.notes])
        if note != notes.FASTEST
        and not notes.is_how_far_off(note)
        and not note.startswith((notes.BATCH_OF, notes.WHAT_IF))
    ]
    own = [note for note in notes.own(r.notes) if not note.startswith(notes.ONE_SITE)]
    return [*own, *beside]


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
    are rows of a command, which stay whatever the number of cases, and `key` is its legend. `table`
    stands in place of a row for each case.
    """
    best = best_of(entries)
    columns, rows = table or _table(entries, named, goal, tokens)
    results = [entry.result for entry in entries]
    learning = [row for row in said if row[0] == "learning"] or learning_row(entries, goal)
    return Screen(
        answer=[*_best(entries, best, tokens), *filter(None, [where])],
        columns=columns,
        table=rows,
        stays=0 if table else list(entries).index(best),
        left=len(named[0]),
        legend=key,
        least=1 + len(said),
        rows=[
            ("cost", _cost(entries, best, tokens, goal)),
            *(row for row in said if row not in learning),
            *_warnings([best, *(entry for entry in entries if entry is not best)]),
            *learning,
            *(_without(entries) if table else []),
            ("counted", counted_row(entries, learns=bool(learning))),
            ("batch", batch_row(results)),
            *shared_rows(best, entries, said=True),
        ],
    )


def best_of(entries: Sequence[Simulated]) -> Simulated:
    """What the answer names first: the best trade of what fits, or the fastest."""
    chosen = totals.chosen([(e.name, e.result, e.totals) for e in entries])
    if chosen:
        name = next(iter(chosen.values()))[0]
        return next(entry for entry in entries if entry.name == name)
    return max(entries, key=lambda e: (e.result.fits_in_memory, e.result.tokens_per_s))


def _without(entries: Sequence[Simulated]) -> list[tuple[str, str]]:
    """What fits with no number of GPUs, which a table over these leaves out."""
    inside = {entry.label for entry in entries if entry.result.fits_in_memory}
    misfits = {entry.label: entry for entry in entries if entry.label not in inside}
    if not inside or not misfits:
        return []
    room = scaled(entries[0].result.gpu_memory_bytes, "B")
    somewhere = {entry.method for entry in entries if entry.result.fits_in_memory}
    by_verdict: dict[str, dict[str, None]] = {}
    for label, entry in misfits.items():
        name = label if entry.method in somewhere else entry.method
        by_verdict.setdefault(entry.result.memory_word, {})[name] = None
    said = [
        f"{verdict} in {room}: {first_of([*names], _NAMED)}"
        for verdict, names in by_verdict.items()
    ]
    return [("memory", "; ".join(said))]


def pace(entry: Simulated) -> tuple[bool, float, float]:
    """What tells which of several comes first: whether it fits, its days or its speed."""
    days = 0.0 if entry.totals is None else 1 / entry.totals.days
    return entry.result.fits_in_memory, days, entry.result.tokens_per_s


def _best(entries: Sequence[Simulated], best: Simulated, tokens: float | None) -> list[str]:
    """The best of several, a sentence each, and which may be as good."""
    trainings = [(entry.name, entry.result, entry.totals) for entry in entries]
    r = best.result
    if tokens is not None:
        said = _chosen(trainings)
    elif r.fits_in_memory:
        said = [f"Fastest: {best.name}, {r.tokens_per_s:,.0f} {r.unit}s/s{_ends(r)}."]
    else:
        said = [f"None of these fits in memory: `co2sim run` of {best.name} says what would."]
    close = [entry for entry in entries if entry is not best and _undecided(best, entry)]
    close.sort(key=lambda entry: entry.result.cluster != r.cluster)
    alike = [e.method for e in entries if (e.result.cluster, e.result.gpus) == (r.cluster, r.gpus)]
    names = [
        e.method if e.result.cluster == r.cluster and alike.count(e.method) == 1 else e.label
        for e in close
    ]
    close_ = f"Undecided: {first_of(names, _NAMED)} may be as good." if names else ""
    lacks = "".join(f" What-if: the stack has {what}." for _, what in _lacking([best]))
    doubts = f"{close_}{lacks}{_far(entries)}{beyond(entries)}".strip()
    return [" ".join(filter(None, [*said, doubts]))]


def beyond(entries: Iterable[Simulated]) -> str:
    """A sentence on cases of more GPUs than the cluster has, where its file says how many."""
    sizes = sorted({size for entry in entries if (size := _fewer(entry))})
    if not sizes:
        return ""
    return (
        f" The cluster has {' or '.join(f'{size:,}' for size in sizes)} GPUs: more are a what-if."
    )


def _fewer(entry: Simulated) -> int | None:
    """How many GPUs the cluster has, where that is stated and less than the case has."""
    stated = entry.case.load()[0]
    size = stated.value.layout.world_size
    open_ = any(fact.path == "nodes" for fact in stated.assumed)
    return size if size < entry.result.gpus and not open_ else None


def _far(entries: Sequence[Simulated]) -> str:
    """A sentence on cases that no published run is near; nothing where some is near all."""
    far = list(dict.fromkeys(entry.method for entry in entries if entry.result.unlike_published))
    if not far:
        return ""
    every = len(far) == len({entry.method for entry in entries})
    return f" No published run is near {'it' if every else first_of(far, _NAMED)}: test first."


def _chosen(trainings: totals.Trainings) -> list[str]:
    """The best trade, the cheapest and the fastest, a line each."""
    chosen = totals.chosen(trainings)
    if not chosen:
        return [totals.NOT_KNOWN]
    said = []
    for head, (name, r, total) in chosen.items():
        assert total is not None
        spent = totals.at_a_glance(total, ranged=len(chosen) == 1)
        lost = f"; it {r.misfit} in memory" if r.misfit else ""
        said.append(f"{head.replace(', and', ' and')}: {name}, {spent}{lost}.")
    return said


_NAMED = 2
"""Cases that are named."""


def _undecided(best: Simulated, other: Simulated) -> bool:
    """Whether another one, on as many GPUs, may be as good: its days or its speed.

    Where a step is not surely worth one of ddp, its worth decides, as in a `Verdict`. Cases of one
    cluster, some of whose numbers differ, share errors as two strategies do.
    """
    if not other.result.fits_in_memory or best.result.gpus != other.result.gpus:
        return False
    if best.result.tokens_per_s == other.result.tokens_per_s:  # as good
        return False
    here, there = best.totals, other.totals
    if here is None or there is None or (here.factor.certain and there.factor.certain):
        alike = best.case.cluster == other.case.cluster
        result = replace(other.result, cluster=best.result.cluster) if alike else other.result
        return (here is None) == (there is None) and undecided(best.result, result)
    least, most = there.days_low, here.days_high
    if least is None or most is None or least > most:
        return False
    worth = math.hypot(math.log(there.factor.ends[0]), math.log(here.factor.ends[1]))
    return math.log(there.days / here.days) <= worth


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
        speed = [
            f"{r.tokens_per_s * _useful(entry):,.0f}",
            *([figures.ends(r)] if tokens is None else []),
        ]
        step = [duration(r.step_time_s)] if tokens is None else []
        size = scaled(r.memory_bytes_per_gpu["total"], "B")
        spent = _spent(entry, entries, tokens)
        if "t CO2e" in columns:
            kg = None if entry.totals is None else entry.totals.co2e_kg
            spent.append("-" if kg is None else totals.amount(kg / 1000))
        rows.append(
            [*cells, *spent, *to_loss, *speed, *step, f"{r.exposed_share:.1%}", size, r.memory_word]
        )
    return columns, rows


def _spent_heads(entries: Sequence[Simulated], tokens: float | None) -> list[str]:
    """Days and money; carbon where only that differs, as by the grid."""
    if tokens is None:
        return []
    trained = [entry.totals for entry in entries if entry.totals]
    days, carbon = {total.days for total in trained}, {total.co2e_kg for total in trained}
    greener = len(days) == 1 < len(carbon)
    return ["days (90 %)", _money(entries), *(["t CO2e"] if greener else [])]


def _money(entries: Sequence[Simulated]) -> str:
    """The currency, or several; GPU-hours where a price is missing."""
    currencies = {str(entry.totals.currency) for entry in entries if entry.totals}
    return "GPU-hours" if "None" in currencies else " or ".join(sorted(currencies))


def _spent(entry: Simulated, entries: Sequence[Simulated], tokens: float | None) -> list[str]:
    """Days and money of a row, under `_spent_heads`."""
    if tokens is None:
        return []
    total = entry.totals
    if total is None:
        return ["-", "-"]
    head = _money(entries)
    money = total.gpu_hours if head == "GPU-hours" else total.cost
    named = f" {total.currency}" if head not in {"GPU-hours", total.currency} else ""
    return [totals.ranged(total, "days"), f"{money:,.0f}{named}"]


def of_counts(
    entries: Sequence[Simulated],
    named: tuple[Sequence[str], Sequence[Sequence[str]]],
    tokens: float | None,
    *,
    whole: bool = False,
) -> tuple[list[str], list[list[str]]]:
    """A table with a column for each number of GPUs, in one piece: days, or speed of a GPU.

    `named` names the rows, with the same cells where they are one. The columns behind the counts
    are of the largest one of a row. What fits with no number is left out, unless that is all.
    Unless it is to be `whole`, where there is no room on the terminal the share of exposed
    communication gives way, then counts in the middle.
    """
    by_row: dict[tuple[str, ...], dict[int, Simulated]] = {}
    best = best_of(entries).result.cluster
    pairs = sorted(zip(named[1], entries, strict=True), key=lambda p: p[1].result.cluster != best)
    for cells, entry in pairs:  # the best cluster first, else in order
        by_row.setdefault(tuple(cells), {})[entry.result.gpus] = entry
    inside = {
        cells: row
        for cells, row in by_row.items()
        if any(entry.result.fits_in_memory for entry in row.values())
    }
    sizes, exposed = sorted({entry.result.gpus for entry in entries}), True
    room = min(console().width, WIDTH)
    while True:
        columns = [*named[0], *(f"{size:,}" for size in sizes), "90 %"]
        columns += [*([_money(entries)] if tokens else []), *["exposed"] * exposed, "memory"]
        rows = [
            [
                *cells,
                *(_at(row.get(size), tokens) for size in sizes),
                *_largest(row[max(row)], entries, tokens, exposed=exposed),
            ]
            for cells, row in (inside or by_row).items()
        ]
        if whole or len(sizes) <= _FEWEST or _width(columns, rows) <= room:
            return columns, rows
        if exposed:
            exposed = False
        else:
            del sizes[len(sizes) // 2]


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
    entry: Simulated, entries: Sequence[Simulated], tokens: float | None, *, exposed: bool
) -> list[str]:
    """What a row says of the largest number of GPUs."""
    r = entry.result
    rest = [*[f"{r.exposed_share:.0%}"] * exposed, r.memory_word]
    low, high = r.tokens_per_s_low, r.tokens_per_s_high
    if tokens is None:
        if low is None or high is None:
            return ["-", *rest]
        return [f"{low / r.gpus:,.0f} to {high / r.gpus:,.0f}", *rest]
    if entry.totals is None:
        return ["-", "-", *rest]
    ends = entry.totals.days_low, entry.totals.days_high
    between = " to ".join(
        "?" if end is None else f"{end:,.0f}" if end > _TENS else f"{end:.2g}" for end in ends
    )
    return [between, _spent(entry, entries, tokens)[1], *rest]


_TENS = 10.0
"""From here on ends of an interval need no decimals."""


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Of a table whose cells are whole, with one column between them."""
    widths = [
        max(max(map(cell_len, head.split()), default=0), *map(cell_len, cells))
        for head, *cells in zip(columns, *rows, strict=True)
    ]
    return sum(widths) + len(widths) - 1
