"""`co2sim plan`: what to buy, or how to run what there is, in words and as tables."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from co2sim.cli.planning_tables import print_options
from co2sim.console import budgets
from co2sim.console.answers import amount, in_words
from co2sim.console.result_tables import print_assumed
from co2sim.console.tables import console, print_lines
from co2sim.decide.break_even import BreakEven, break_even
from co2sim.decide.candidates import Space
from co2sim.decide.command import command_of, with_tokens
from co2sim.decide.levers import Lever, levers
from co2sim.decide.plan import Recommendation, plan
from co2sim.decide.wanted import Candidate, Wanted
from co2sim.errors import OptionError
from co2sim.grid import label
from co2sim.progress import progress_bar
from co2sim.step_factors import remark
from co2sim.units import counted, scaled

_MOST_ROWS = 12
"""Of the table of the best by cluster and strategy."""


def planning(space: Space, wanted: Wanted, jobs: int, *, as_json: bool) -> None:
    """Plan, and print."""
    with progress_bar("looking at candidates") as done:
        found = plan(space, wanted, jobs=jobs, done=done)
    choice, other = found.choice, found.runner_up
    if not found.front:
        if found.interrupted:
            raise KeyboardInterrupt("no candidate was done")
        raise OptionError(_nothing(found))
    turns: list[BreakEven] = []
    held: list[Lever] = []
    interrupted = found.interrupted
    if choice and not interrupted:
        try:
            turns = break_even(choice, other, wanted) if other else []
            held = levers(choice.case)
        except KeyboardInterrupt:
            interrupted = True
    if as_json:
        print(json.dumps(_plain(found, turns, held), indent=2))
    else:
        _print(console(), space, found, turns, held)
    if interrupted:
        raise KeyboardInterrupt("what was found until then is above")
    if choice is None:
        raise typer.Exit(1)


def words(found: Recommendation, turns: Sequence[BreakEven], held: Sequence[Lever]) -> list[str]:
    """The answer in sentences."""
    choice = found.choice
    if choice is None:
        return [_nothing(found)]
    told = [f"Take {_told(choice)}."]
    if found.interrupted:
        seen = f"{found.simulated:,} of {found.candidates:,} candidates"
        told = [
            f"Stopped after {seen}: there may be a better one.",
            f"So far the best: {_told(choice)}.",
        ]
    told += list(_limits(found, choice))
    told.append(_against(found, choice))
    if held:
        lever = held[0]
        told.append(
            f"What binds: {lever.change}; a tenth more of it gives {lever.gain:.1%} more"
            f" {choice.result.unit}s/s."
        )
    for turn in turns:
        side = "rises above" if turn.above else "falls below"
        told.append(
            f"The runner-up wins where {turn.what} {side} {turn.shown_at} (now {turn.shown_now})."
        )
    return told


def _told(option: Candidate) -> str:
    case, found = option.case, option.totals
    text = (
        f"{counted(option.result.gpus, 'GPU')} of {label(case.cluster)} with"
        f" {option.result.strategy}, micro-batch {case.micro_batch} x"
        f" {option.result.accumulation}"
    )
    text += f", recompute {case.recompute}" if case.recompute != "none" else ""
    return f"{text}: {in_words(found, option.result.unit)}"


def _limits(found: Recommendation, choice: Candidate) -> Iterator[str]:
    """Whether limits hold at the bad end of the interval, too."""
    wanted, total = found.wanted, choice.totals
    for name, most, worst, unit in (
        ("deadline", wanted.deadline, total.days_high, "days"),
        ("budget", wanted.budget, total.cost_high, total.currency),
    ):
        if most is None:
            continue
        shown = f"the {name} of {amount(most)} {unit}"
        if worst is None:
            yield f"How sure {shown} is, nobody knows: there is no interval."
        elif worst <= most:
            yield f"It keeps {shown} at the bad end of its interval, too."
        else:
            yield f"It may miss {shown}: the bad end of its interval is {amount(worst)} {unit}."
            yield from _safer(found, name, most)


def _safer(found: Recommendation, name: str, most: float) -> Iterator[str]:
    """The best one of those shown that keeps a limit at the bad end, too."""

    def worst(option: Candidate) -> float | None:
        return option.totals.days_high if name == "deadline" else option.totals.cost_high

    sure = [o for o in (*found.best, *found.front) if (w := worst(o)) is not None and w <= most]
    if sure:
        best = min(sure, key=lambda option: option.score(found.wanted.want))
        yield f"The best of those below that keeps it at the bad end, too: {_told(best)}."


def _against(found: Recommendation, choice: Candidate) -> str:
    other, want = found.runner_up, found.wanted.want
    if other is None:
        return "No other cluster, strategy or number of GPUs was tried that is within the limits."
    margin = other.score(want) / choice.score(want) - 1
    verb, what = {
        "cheapest": ("is", "dearer"),
        "fastest": ("is", "slower"),
        "least-energy": ("takes", "more energy"),
    }[want]
    much = f"{margin:.1%}" if margin < 1 else f"{margin + 1:,.3g} times"
    text = f"The runner-up {verb} {much} {what}: {_told(other)}."
    if found.undecided:
        return f"{text} Between the two it is undecided: their intervals overlap."
    return f"{text} Their intervals do not overlap."


def _nothing(found: Recommendation) -> str:
    """Why there is no choice."""
    wanted = found.wanted
    limits = [
        *([f"{wanted.deadline:g} days"] if wanted.deadline else []),
        *([f"a budget of {wanted.budget:,.6g}"] if wanted.budget else []),
        *([scaled(wanted.power, "W")] if wanted.power else []),
    ]
    if not found.front:
        if found.failed:
            return f"no candidate can be simulated: {found.failed[0]}"
        return (
            f"none of {found.large:,} candidates fits in memory; take more GPUs, another strategy"
            " (-s fsdp), --recompute full or less --headroom"
        )
    fastest, cheapest = found.front[0], found.front[-1]
    text = f"nothing is within {' and '.join(limits)}; the fastest is {_told(fastest)}"
    return text if fastest is cheapest else f"{text}; the cheapest is {_told(cheapest)}"


def _print(
    out: Console,
    space: Space,
    found: Recommendation,
    turns: Sequence[BreakEven],
    held: Sequence[Lever],
) -> None:
    print_lines(out, *words(found, turns, held), "")
    print_options(out, "no other is both faster and cheaper", found.front)
    best = found.best[:_MOST_ROWS]
    more = f", the first {len(best)} of {len(found.best)}" if len(found.best) > len(best) else ""
    print_options(out, f"the best by cluster and strategy{more}", best)
    print_lines(out, *_looked(space, found))
    if line := remark((option.result.strategy for option in found.best), found.wanted.goal):
        print_lines(out, line)
    shown = found.best[:1]
    budgets.print_basis(out, [option.case for option in shown], [o.totals for o in shown])
    print_assumed(out, [option.result for option in shown])
    if found.choice:
        # to be copied: in one piece, whatever the width
        for line in _commands(found.choice, found.wanted):
            out.print(Text(line), soft_wrap=True)


def _looked(space: Space, found: Recommendation) -> Iterator[str]:
    """What was looked at, and what was taken for granted."""
    yield (
        f"{found.candidates:,} candidates fit in memory with {space.headroom:.0%} to spare,"
        f" {found.large:,} do not; {found.simulated:,} were simulated, the others"
        f" {'were not looked at' if found.interrupted else 'cannot win'}"
    )
    given = space.job.global_batch is not None
    why = "" if given else " (assumed: 4M tokens, as Llama 3 began with; --global-batch sets it)"
    yield f"global batch: {space.global_batch:,} samples a step{why}"
    for name, reason in list(found.impossible.items())[:3]:
        yield f"left out: {name}: {reason}"
    for reason in found.failed[:3]:
        yield f"failed: {reason}"
    for name in found.unknown:
        yield f"left out: {name}: nobody has measured what its steps are worth; --steps-factor"


def _commands(choice: Candidate, wanted: Wanted) -> Iterator[str]:
    """What repeats it, and what tests it on two nodes."""
    yield f"to see it in full: {in_full(choice, wanted)}"
    nodes = "two nodes" if choice.cluster.nodes > 1 else "one node"
    yield f"to test it on {nodes}: {trial(choice)}"


def in_full(choice: Candidate, wanted: Wanted) -> str:
    """The command that gives the same totals."""
    return with_tokens(command_of(choice.case), wanted.tokens, wanted.goal)


def trial(choice: Candidate) -> str:
    """The command that runs the same on two real nodes, with the samples that a GPU has."""
    case, cluster = choice.case, choice.cluster
    nodes = min(2, cluster.nodes)
    batch = nodes * cluster.gpus_per_node * case.micro_batch * choice.result.accumulation
    asked = command_of(case, "run").replace("co2sim run", "-m realrun run --backend nccl", 1)
    asked = asked.replace(f" --gpus {case.gpus}", "")
    asked = asked.replace(f"--global-batch {case.global_batch}", f"--global-batch {batch}")
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {cluster.gpus_per_node} --rdzv-backend c10d"
        f" --rdzv-endpoint first-node:29500 {asked} --out out"
    )


def _plain(
    found: Recommendation, turns: Sequence[BreakEven], held: Sequence[Lever]
) -> dict[str, Any]:
    """As plain values for JSON."""
    choice = found.choice
    return {
        "answer": words(found, turns, held),
        "want": found.wanted.want,
        "choice": choice and _option(choice, found.wanted),
        "runner_up": found.runner_up and _option(found.runner_up, found.wanted),
        "undecided": found.undecided,
        "break_even": [asdict(turn) for turn in turns],
        "levers": [asdict(lever) for lever in held],
        "front": [_option(option, found.wanted) for option in found.front],
        "best": [_option(option, found.wanted) for option in found.best],
        "candidates": found.candidates,
        "simulated": found.simulated,
        "do_not_fit": found.large,
        "left_out": found.impossible,
        "failed": list(found.failed),
        "not_measured": list(found.unknown),
        "interrupted": found.interrupted,
        "commands": list(_commands(choice, found.wanted)) if choice else [],
    }


def _option(option: Candidate, wanted: Wanted) -> dict[str, Any]:
    case = option.case
    return {
        "cluster": label(case.cluster),
        "strategy": option.result.strategy,
        "gpus": option.result.gpus,
        "micro_batch": case.micro_batch,
        "accumulation": option.result.accumulation,
        "recompute": case.recompute,
        "totals": asdict(option.totals),
        "command": in_full(option, wanted),
        "result": option.result.to_dict(),
    }
