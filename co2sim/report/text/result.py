"""The figures of a configuration, simulated or measured, on the terminal."""

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

from co2sim.catalog import Fact
from co2sim.common.tables import console, print_lines, print_table
from co2sim.common.units import counted, duration, percent, scaled
from co2sim.prediction import evidence, figures, notes
from co2sim.prediction.figures import INTERVAL, list_of
from co2sim.prediction.intervals import undecided
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import NO_GOAL, Goal
from co2sim.prediction.step_memory import StepMemory
from co2sim.prediction.verdict import Verdict
from co2sim.report.text import totals
from co2sim.report.text.memory import print_fitting, print_memory
from co2sim.schedule.schedule import Layout
from co2sim.simulation.noise import QUIET, Noise

_NUMBERS = re.compile(r"[0-9][0-9.,]*")
_NAMED = 4
"""Nodes whose speeds are named one by one."""


def print_result(
    result: Result,
    *,
    measured: bool = False,
    noise: Noise = QUIET,
    goal: Goal | None = None,
    more: Sequence[tuple[str, str]] = (),
    near: Sequence[str] = (),
    memory: StepMemory | None = None,
    alone: bool = True,
) -> None:
    """All figures of one configuration, simulated or measured; `noise` is named in the header.

    With a goal it says what it takes to get to that loss. `more` are further rows of the table of
    figures, `near` lines on published runs; `memory` is that over a step, where it is known. Unless
    it is `alone`, remarks and assumed inputs, which others share, are left to the caller.
    """
    out = console()
    r = result
    _print_header(out, r, noise)
    _print_each(out, "", [("", notes.own(r.notes))])
    rows = [*list_of(r)]
    if measured and r.straggler_delay_s is None and r.waiting_s:
        rows.append(("waiting for other ranks, hidden or not, per round", duration(r.waiting_s)))
    rows += [*(totals.loss_rows(r, goal) if goal else []), *more]
    print_table(out, "figures", ("figure", "value"), rows)
    if r.interval_source:
        print_sources(out, [r], *near, "")
    rounds = counted(r.rounds_simulated, "round")
    if measured:
        out.print(f"measured: averages over the last of {rounds}")
    elif not r.steady:
        out.print(f"not a steady state: averaged over the last of {rounds}")
    print_table(
        out,
        "spans of the last round on one rank, by work (overlapping, waiting included)",
        ("work", "time", "sent per GPU and step"),
        [
            (
                name,
                duration(value),
                scaled(sent, "B") if (sent := r.sent_bytes_per_gpu_per_step.get(name)) else "",
            )
            for name, value in r.breakdown_s.items()
        ],
    )
    print_memory(out, r, memory)
    print_warnings(out, [("", result)])
    if alone:
        print_remarks(out, [result])
        print_assumed(out, [result])


def print_details(
    cases: Sequence[Question],
    results: Sequence[Result],
    goal: Goal = NO_GOAL,
    tokens: float | None = None,
) -> None:
    """All figures of each simulated case; what they share comes last, once.

    With `tokens` it says what it takes to train these.
    """
    out = console()
    trained = totals.totals_for(cases, results, tokens, goal)
    for case, result, total in zip(cases, results, trained, strict=True):
        more = [] if tokens is None else totals.rows_of(total, result.unit)
        memory = StepMemory.of(case, result)
        about: Any = {"near": _near(case, result), "memory": memory}
        print_result(result, noise=case.noise, goal=goal, more=more, **about, alone=False)
        if not result.fits_in_memory:
            print_fitting(out, memory)
    print_remarks(out, results)
    print_assumed(out, results)
    print_lines(out, *totals.basis_lines(cases, trained))


def _near(case: Question, result: Result) -> list[str]:
    """The published run that is most like a case, where such runs made its interval."""
    if result.nearest_published is None:
        return []
    return [f"nearest published run: {evidence.nearest(case, result, 1)[0]}"]


def print_verdicts(judged: Sequence[Verdict]) -> None:
    """Whether each local-update method is worth it, and the Python that trains so."""
    for verdict in judged:
        said, how = verdict_lines(verdict, named=len(judged) > 1)
        print_lines(console(), said)
        print(how)  # a whole line, to copy


def verdict_lines(verdict: Verdict, *, named: bool) -> tuple[str, str]:
    """The verdict, and the Python that trains so."""
    how = f"no training code: {verdict.untrainable}"
    if verdict.python:
        names = sorted(set(re.findall(r"\b[A-Z]\w+(?=[(.])", verdict.python)))
        how = f"train so, with {' and '.join(names)} of realrun.algorithms: {verdict.python}"
    return f"verdict: {f'{verdict.strategy}: ' if named else ''}{verdict}", how


def print_evidence(case: Question, result: Result, *, named: bool = False) -> None:
    """The published runs that are most like it, with their errors; the strategy where `named`.

    Throughputs are tokens/s of a GPU; distances are those of `likeness`.
    """
    near = evidence.nearest(case, result)
    what = result.strategy if named else "it"
    title = f"the published runs that are most like {what}, predicted without their source"
    print_table(console(), title, evidence.EVIDENCE_COLUMNS, evidence.evidence_rows(near), left=3)


def batch_words(r: Result) -> str:
    """The batch of a result, and how GPUs take it."""
    micro = f"micro-batch {r.micro_batch}" + (f" x {r.accumulation}" if r.accumulation > 1 else "")
    size = counted(r.tokens_per_gpu_per_step, r.unit)
    each = f"{micro}: {size} per GPU and step; recompute {r.recompute}"
    if r.global_batch is None:
        return each
    return f"{figures.whole_batch(r)}, {each}"


def _print_header(out: Console, r: Result, noise: Noise) -> None:
    where = f" on {counted(r.gpus, 'GPU')} in {counted(r.nodes, 'node')}"
    where += ": no published run is near this one" if r.unlike_published else ""
    print_lines(
        out,
        Text.assemble((r.strategy, "bold"), where),
        f"cluster  {r.place}",
        f"model    {r.model}, {r.precision}, {r.optimizer}",
        f"batch    {batch_words(r)}",
        *([f"stack    {r.stack}"] if r.stack else []),
        *([f"layers   {r.division}"] if r.division else []),
        *([f"trained  {adapters(r)}"] if r.lora else []),
        *(["spans    those of the first stage, as is what is sent"] if r.pp > 1 else []),
        *([f"speeds   {speeds(noise, r)}"] if noise.uneven else []),
        "",
    )


def stacks_of(results: Iterable[Result]) -> str:
    """The software stacks that all is predicted with; empty where none is known."""
    names = list(dict.fromkeys(result.stack for result in results if result.stack))
    return f"stack{'s' * (len(names) > 1)}: {'; '.join(names)}" if names else ""


def adapters(r: Result) -> str:
    """What is trained of a model with adapters."""
    return f"{adapters_of(r)}: {counted(r.trained_parameters or 0, 'parameter')}"


def adapters_of(r: Result) -> str:
    """The rank of adapters, and how the weights beside them are stored."""
    beside = f" beside {r.quantize_base}" if r.quantize_base != "none" else ""
    return f"adapters of rank {r.lora}{beside}"


def speeds(noise: Noise, result: Result | None = None, varied: Collection[str] = ()) -> str:
    """A text: how fast nodes and ops were, of one run, or of many, but for what `varied`."""
    said = [f"node {node} at {speed:g} of nominal" for node, speed in noise.node_speed.items()]
    more = len(said) - _NAMED
    said = [*said[:_NAMED], *([f"{more} more nodes"] if more > 0 else [])]
    seed = "" if "seed" in varied else f"seed {noise.seed}"
    behind = f" ({seed})" if seed else ""
    if noise.straggle and result is not None:
        layout = Layout(result.nodes, result.gpus // result.nodes)
        slowdowns = noise.node_slowdowns(layout)
        span = f"{1 / max(slowdowns):.3g} to {1 / min(slowdowns):.3g} of nominal"
        said.append(f"all nodes from {span} (straggle {noise.straggle:g}, {seed})")
    elif noise.straggle and "straggle" not in varied:
        said.append(f"straggle {noise.straggle:g} on every node{behind}")
    if noise.jitter and "jitter" not in varied:
        said.append(f"jitter {noise.jitter:g} on every op{behind}")
    return ", ".join(said)


def print_chosen(out: Console, named: Iterable[tuple[str, Result]]) -> None:
    """What was chosen for options left open, behind the name of its case; and remarks."""
    named = list(named)
    _print_each(out, "", ((name, notes.own(r.notes)) for name, r in named))
    print_remarks(out, [r for _, r in named])


def _print_each(out: Console, head: str, named: Iterable[tuple[str, Sequence[str]]]) -> None:
    """What is said of each case, behind its name; of lines with other numbers only, the last."""
    kinds: dict[str, list[str]] = {}
    for name, texts in named:
        for text in texts:
            line = f"{head}{name}{': ' if name else ''}{text}"
            kinds.setdefault(_NUMBERS.sub("", line), []).append(line)
    for lines in kinds.values():
        more = f" (and {len(lines) - 1} like it)" if len(lines) > 1 else ""
        print_lines(out, lines[-1] + more)
    if kinds:
        print_lines(out, "")


def question(results: Sequence[Result]) -> list[str]:
    """What results answer, a line each: their batch, where it comes from, and their stack."""
    if not results:
        return []
    taken = "; ".join(
        dict.fromkeys(
            f"{result.strategy}: {figures.brief_batch(result)} (micro-batch x micro-steps,"
            " recomputation)"
            for result in results
        )
    )
    batch = f"batch: {figures.shared_batch(results)}, {results[0].precision}; {taken}"
    return [batch, *notes.alike(result.notes for result in results), stacks_of(results)]


def print_remarks(out: Console, results: Iterable[Result]) -> None:
    """The notes that many results have alike, once each."""
    lines = [f"note: {remark}" for remark in notes.alike(r.notes for r in results)]
    if lines:
        print_lines(out, *lines, "")


def print_warnings(out: Console, named: Iterable[tuple[str, Result]]) -> None:
    """What holds a strategy back: one line for each case, behind its name."""
    _print_each(out, "warning: ", ((name, r.warnings) for name, r in named))


def print_assumed(out: Console, results: Iterable[Result]) -> None:
    """The inputs that no source supports: one line each, whatever their values."""
    facts_at: dict[str, list[Fact]] = {}
    for fact in dict.fromkeys(fact for result in results for fact in result.assumed):
        facts_at.setdefault(fact.path, []).append(fact)
    if facts_at:
        rows = [(path, *_merged(facts)) for path, facts in facts_at.items()]
        title = "assumed, not measured or published"
        print_table(out, title, ("number", "value", "why"), rows, left=3)


def _merged(facts: list[Fact]) -> tuple[str, str]:
    """The value, or the first and the last of several, and why."""
    values = list(dict.fromkeys(fact.value for fact in facts))
    reasons = list(dict.fromkeys(fact.source.removeprefix("assumed: ") for fact in facts))
    value = values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"
    others = len(reasons) - 1
    return value, reasons[0] + (f"; and {counted(others, 'case')} like it" if others else "")


_MAX_NAMED = 3
"""Strategies that are named."""
_PAIRS = 8
"""Pairs of strategies that are named."""


def relative(result: Result) -> str:
    """Its ends relative to the prediction; a dash for none."""
    low, high = result.tokens_per_s_low, result.tokens_per_s_high
    if low is None or high is None:
        return "-"
    return " to ".join(percent(end / result.tokens_per_s - 1) for end in (low, high))


def print_sources(out: Console, results: Iterable[Result], *after: str) -> None:
    """Where intervals come from, and of which strategies if not of all; and lines after that.

    A strategy whose intervals have several sources is named with its GPUs.
    """
    every = [result for result in results if result.interval_source]
    sources: dict[str, set[str]] = {}
    for result in every:
        sources.setdefault(result.strategy, set()).add(result.interval_source)
    names_of: dict[str, dict[str, None]] = {}
    for result in every:
        size = f" on {counted(result.gpus, 'GPU')}" if len(sources[result.strategy]) > 1 else ""
        names_of.setdefault(result.interval_source, {})[f"{result.strategy}{size}"] = None
    lines = []
    for source, names in names_of.items():
        whose = f" of {first_of([*names], _MAX_NAMED)}" if len(names_of) > 1 else ""
        lines.append(f"{INTERVAL}{whose}: {source}")
    print_lines(out, *lines, *after)


def first_of(names: Sequence[str], most: int) -> str:
    """The first of many, and how many more there are."""
    left = len(names) - most
    return ", ".join(names[:most]) + (f" and {left:,} more" if left > 0 else "")


def not_told_apart(named: Sequence[tuple[str, Result]]) -> str:
    """One line on neighbours in speed, of those that fit, whose order is undecided; "" for none."""
    inside = [pair for pair in named if pair[1].fits_in_memory]
    ranked = sorted(inside, key=lambda pair: -pair[1].tokens_per_s)
    pairs = [
        f"{name} and {following}"
        for (name, first), (following, second) in pairwise(ranked)
        if undecided(first, second)
    ]
    return too_close(pairs, ranked[0][1].gpus, _PAIRS) if pairs else ""


def too_close(pairs: Sequence[str], gpus: int, most: int) -> str:
    """One line that names the first pairs whose order is undecided."""
    more = len(pairs) - most
    names = "; ".join(pairs[:most]) + (f"; and {more} pairs more" if more > 0 else "")
    return f"undecided at {counted(gpus, 'GPU')}, too close to call: {names}"
