"""What `co2sim plan` says: sentences, commands and plain values."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from co2sim.common.units import counted, scaled
from co2sim.prediction.totals import Totals, knee, spent
from co2sim.report.text.totals import TRADE, amount, in_short, in_words, trade
from co2sim.studies.candidates import Candidate, Objective, Space, command_of, with_tokens
from co2sim.studies.grid import display_name, offer_name
from co2sim.studies.plan import Recommendation, overlap
from co2sim.studies.sensitivity import BreakEven, Sensitivity

_KEEPS = "It keeps"
_UNDECIDED = "Undecided: the 90 % intervals of the choice and the runner-up overlap."


def words(
    found: Recommendation, turns: Sequence[BreakEven], held: Sequence[Sensitivity]
) -> list[str]:
    """The answer in sentences."""
    choice = found.choice
    if choice is None:
        return [nothing(found)]
    told = [f"Take {_told(choice)}."]
    if found.interrupted:
        told = [_stopped(found), f"So far the best: {_told(choice)}."]
    told += list(limits(found, choice))
    told.append(_room(choice))
    told += traded(found)
    told += list(_against(found))
    if held:
        lever = held[0]
        told.append(
            f"Main limit: {lever.change}; a tenth more of it gives {lever.gain:.1%} more"
            f" {choice.result.unit}s/s."
        )
    return [*told, *turning(turns)]


def _room(choice: Candidate) -> str:
    """How much of the memory of a GPU it takes, and whether published runs are near."""
    found = choice.result
    size, room = (
        scaled(found.memory_bytes_per_gpu["total"], "B"),
        scaled(found.gpu_memory_bytes, "B"),
    )
    text = f"Memory: {size} of the {room} of a GPU, {found.misfit or found.memory_fit}"
    if found.memory_bytes_low is not None and found.memory_bytes_high is not None:
        ends = scaled(found.memory_bytes_low, "B"), scaled(found.memory_bytes_high, "B")
        text += f" (90 %: {ends[0]} to {ends[1]})"
    if found.unlike_published:
        return f"{text}. No published run is near it: test it first."
    return f"{text}." if found.memory_fit == "fits" else f"{text}. Test it on one node first."


def doubts(found: Recommendation) -> list[str]:
    """Of the words, those that say what is not sure."""
    choice = found.choice
    if choice is None:
        return []
    told = [_stopped(found)] if found.interrupted else []
    told += [text for text in limits(found, choice) if not text.startswith(_KEEPS)]
    return [*told, *([_UNDECIDED] if found.undecided else [])]


def _stopped(found: Recommendation) -> str:
    """What an interrupted plan leaves open."""
    seen = f"{found.simulated:,} of {found.candidates:,} candidates"
    return f"Stopped after {seen}: there may be a better one."


def named(option: Candidate) -> str:
    """How many GPUs of which offer, and how they are used."""
    gpus = counted(option.result.gpus, "GPU")
    return f"{gpus} of {offer_name(option.case.cluster)} with {option.result.strategy}"


def spends(option: Candidate) -> list[str]:
    """Days, money (or GPU-hours), energy and carbon."""
    return [f"{in_words(option.totals, option.result.unit)}."]


def others(found: Recommendation) -> list[str]:
    """The runner-up and the best of another offer, in short."""
    options = {"": found.runner_up, "The best of another offer: ": found.rival}
    if found.rival == found.runner_up:
        del options["The best of another offer: "]
    return [
        f"{head}{named(one)}: {_spent(one.totals)}; {_margin(found, one)}."
        for head, one in options.items()
        if one
    ]


def _spent(found: Totals) -> str:
    """Days and money, or GPU-hours."""
    unit = "GPU-hours" if found.cost is None else found.currency
    return f"{amount(found.days)} days, {spent(found):,.0f} {unit}"


def _margin(found: Recommendation, other: Candidate) -> str:
    """How far it is behind the choice."""
    assert found.choice is not None
    margin = other.score(found.wanted.want) / found.choice.score(found.wanted.want) - 1
    much = f"{margin:.1%}" if margin < 1 else f"{margin + 1:,.3g} times"
    return f"{much} {_BEHIND[found.wanted.want][1]}"


_BEHIND = {
    "cheapest": ("is", "dearer"),
    "fastest": ("is", "slower"),
    "least-energy": ("takes", "more energy"),
}
"""A verb, and what is more."""


def turning(turns: Sequence[BreakEven]) -> list[str]:
    """Where another option wins."""
    return [
        f"Where {turn.what} {'rises above' if turn.above else 'falls below'} {turn.shown_at}"
        f" (now {turn.shown_now}), {turn.winner} wins."
        for turn in turns
    ]


def _told(option: Candidate) -> str:
    case, found = option.case, option.totals
    text = f"{named(option)}, micro-batch {case.micro_batch} x {option.result.accumulation}"
    divided = case.mesh_words()
    text += f", {divided}" if divided else ""
    text += f", recompute {case.recompute}" if case.recompute != "none" else ""
    return f"{text}: {in_words(found, option.result.unit)}"


def best_trade(found: Recommendation) -> Candidate | None:
    """The knee of the front, where it is no end of it that is the choice."""
    if found.choice is None:
        return None
    best = found.front[knee([option.totals for option in found.front])]
    return None if best == found.choice else best


def traded(found: Recommendation, *, brief: bool = False) -> list[str]:
    """The knee of the front, against its cheap end; nothing where it is the choice."""
    best, cheapest = best_trade(found), found.front[-1]
    if best is None:
        return []
    told = f"{named(best)}, "
    if best is cheapest:
        told += f"{in_short(best.totals, best.result.unit)}"
    else:
        told += trade(best.totals, cheapest.totals)
    head = "The best trade of days against money"
    return [f"{told}."] if brief else [f"{head}: {told}. It has {TRADE}."]


def limits(found: Recommendation, choice: Candidate) -> Iterator[str]:
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
            yield f"How sure {shown} is, is not known: there is no interval."
        elif worst <= most:
            yield f"{_KEEPS} {shown} at the bad end of its interval, too."
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


def _against(found: Recommendation) -> Iterator[str]:
    other, want = found.runner_up, found.wanted.want
    if other is None:
        yield "No other cluster, strategy or number of GPUs was tried that is within the limits."
        return
    yield f"The runner-up {_BEHIND[want][0]} {_margin(found, other)}: {_told(other)}."
    yield _UNDECIDED if found.undecided else "They differ by more than may be wrong."
    if found.rival and found.rival is not other:
        yield f"The best on another cluster: {_told(found.rival)}."
        if found.choice and overlap(found.choice, found.rival, want):
            both = (offer_name(one.case.cluster) for one in (found.choice, found.rival))
            yield f"Undecided between {' and '.join(both)}: their 90 % intervals overlap."


def nothing(found: Recommendation) -> str:
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


def looked(space: Space, found: Recommendation) -> Iterator[str]:
    """What was looked at, and what was taken for granted."""
    yield (
        f"{found.candidates:,} candidates: {found.simulated:,} were simulated, {found.large:,} do"
        f" not leave {space.headroom:.0%} of the memory free, the others"
        f" {'were not looked at' if found.interrupted else 'are slower or dearer by a bound'}"
    )
    if found.unsearched:
        pairs = counted(found.unsearched, "pair")
        yield f"{pairs} of cluster and strategy not shown: stopped early, as they cannot win"
    source = space.batch_source
    why = f" (assumed: {source}; --global-batch sets it)" if source else ""
    if not space.stacks:
        yield "one software stack was tried; --stack torchtitan,megatron-core tries two"
    near = "" if isinstance(space.job.global_batch, int) else ", or what GPUs divide well near it"
    yield f"global batch: {space.global_batch:,} samples a step{near}{why}"
    for name, reason in list(found.impossible.items())[:3]:
        yield f"left out: {name}: {reason}"
    for reason in found.failed[:3]:
        yield f"failed: {reason}"
    for name in found.unknown:
        yield f"left out: {name}: what its steps are worth was not measured; --steps-factor"


def commands(choice: Candidate, wanted: Objective) -> Iterator[str]:
    """What repeats it, and what tests it on two nodes."""
    yield f"to see it in full: {in_full(choice, wanted)}"
    if command := trial(choice):
        nodes = "two nodes" if choice.cluster.nodes > 1 else "one node"
        yield f"to test it on {nodes}: {command}"


def in_full(choice: Candidate, wanted: Objective) -> str:
    """The command that gives the same totals."""
    return with_tokens(command_of(choice.case), wanted.tokens, wanted.goal)


def trial(choice: Candidate) -> str:
    """The command that runs the same on two real nodes, with the samples that a GPU has.

    Empty for a pipeline, which cannot be run.
    """
    case, cluster = choice.case, choice.cluster
    if case.pp > 1:
        return ""
    nodes = min(2, cluster.nodes)
    groups = nodes * cluster.gpus_per_node // case.in_stage
    batch = groups * case.micro_batch * choice.result.accumulation
    asked = command_of(case, "run").replace("co2sim run", "-m realrun run --backend nccl", 1)
    asked = asked.replace(f" --gpus {case.gpus}", "")
    asked = asked.replace(f"--global-batch {case.global_batch}", f"--global-batch {batch}")
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {cluster.gpus_per_node} --rdzv-backend c10d"
        f" --rdzv-endpoint first-node:29500 {asked} --out out"
    )


def plain(
    found: Recommendation, turns: Sequence[BreakEven], held: Sequence[Sensitivity]
) -> dict[str, Any]:
    """As plain values for JSON."""
    choice = found.choice
    return {
        "answer": words(found, turns, held),
        "want": found.wanted.want,
        "choice": choice and _option(choice, found.wanted),
        "runner_up": found.runner_up and _option(found.runner_up, found.wanted),
        "rival": found.rival and _option(found.rival, found.wanted),
        "best_trade": (best := best_trade(found)) and _option(best, found.wanted),
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
        "commands": list(commands(choice, found.wanted)) if choice else [],
    }


def _option(option: Candidate, wanted: Objective) -> dict[str, Any]:
    case = option.case
    return {
        "cluster": display_name(case.cluster),
        "strategy": option.result.strategy,
        "gpus": option.result.gpus,
        "micro_batch": case.micro_batch,
        "accumulation": option.result.accumulation,
        "recompute": case.recompute,
        **case.mesh_values(),
        "totals": asdict(option.totals),
        "command": in_full(option, wanted),
        "result": option.result.to_dict(),
    }
