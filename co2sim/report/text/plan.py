"""What `co2sim plan` says: sentences, commands and plain values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from co2sim.common.units import counted, scaled
from co2sim.prediction.notes import lacking
from co2sim.prediction.totals import knee, spent
from co2sim.report.text.answer import (
    Simulated,
    batch_row,
    beyond,
    counted_row,
    job,
    labels,
    learning_row,
    legend,
    place,
    setup,
    shared_rows,
)
from co2sim.report.text.bill import billed
from co2sim.report.text.launch import launch_row
from co2sim.report.text.screen import Screen
from co2sim.report.text.totals import (
    amount,
    at_a_glance,
)
from co2sim.studies.candidates import Candidate, Objective, Space, command_of, with_tokens
from co2sim.studies.grid import display_name, offer_name, short_names
from co2sim.studies.plan import Recommendation, limits_of
from co2sim.studies.sensitivity import RUNNER_UP, BreakEven, Sensitivity


def screen(
    space: Space, answer: Recommendation, turns: Sequence[BreakEven], trainer: str = ""
) -> Screen:
    """The first screen: what to take, what else there is, and what rests on what.

    `trainer` is the one whose file asks; see `launch`.
    """
    choice = answer.choice
    if choice is None:
        return _without(space, answer)
    beside = (answer.gamble, answer.runner_up, answer.rival, best_trade(answer))
    options = [choice, *(option for option in beside if option)]
    short = _Short(
        labels(option.result.strategy for option in options), short_names(space.clusters)
    )
    entry = short.simulated(choice)
    stopped = f"{_stopped(answer)} So far the best: take" if answer.interrupted else "Take"
    what = job(choice.result, answer.wanted.tokens)
    glance = at_a_glance(choice.totals)
    divided = f", {words_}" if (words_ := choice.case.mesh_words()) else ""
    said = [
        f"{stopped} {entry.name}{divided}: {what} in {glance}.",
        " ".join(filter(None, [*_lacks(choice), *limits(answer, choice), beyond([entry]).strip()])),
    ]
    named = {short.labels[option.result.strategy]: option.result.strategy for option in options}
    bill = billed(choice.totals, choice.case.load()[0], answer.wanted.deadline)
    learns = learning_row([entry], answer.wanted.goal)
    place_ = setup([place(choice.result)], [choice.result])
    said.append(place_ if space.stacks else f"{place_}{_ONE_STACK}")
    return Screen(
        answer=[line for line in said if line],
        rows=[
            *_beside(answer, short),
            *_prices(space, short),
            ("memory", choice.result.memory_answer),
            *([("turns", short.turning(answer, turns[0]))] if turns else []),
            ("counted", counted_row([entry], learns=bool(learns))),
            *learns,
            *([("cost", bill)] if bill else []),
            *shared_rows(entry, [entry]),
            ("batch", batch_row([choice.result])),
            *launch_row(choice.case, choice.result, trainer),
            (
                "tried",
                f"{answer.candidates:,} ways, {answer.simulated:,} simulated{_sizes(answer)}",
            ),
            *(("names", line.strip("()")) for line in legend(named)),
        ],
    )


def _lacks(choice: Candidate) -> list[str]:
    """What the stack has not of what is taken, where strategies were named."""
    return [f"What-if: {text}." for text in lacking([choice.result.notes])]


def _tried(answer: Recommendation) -> str:
    return f"{answer.candidates:,} ways, {answer.simulated:,} simulated"


def _sizes(answer: Recommendation) -> str:
    """Which numbers of nodes were not tried."""
    return "; of nodes only doubled numbers: -g names others" if answer.doubled else ""


_ONE_STACK = "; others: --stack NAME"


def _without(space: Space, answer: Recommendation) -> Screen:
    """The screen where nothing is within the limits: what there is without them."""
    options = {"fastest": answer.front[0]}
    if len(answer.front) > 1:
        options["cheapest"] = answer.front[-1]
    titles = labels(option.result.strategy for option in options.values())
    short = _Short(titles, short_names(space.clusters))
    entries = {head: short.simulated(option) for head, option in options.items()}
    first, what = answer.front[0].result, _over(answer)
    return Screen(
        answer=[
            f"{what[0].upper()}{what[1:]}.{beyond(entries.values())}",
            setup([job(first, answer.wanted.tokens)], [first]),
        ],
        rows=[
            *(
                (head, f"{entry.name}, {at_a_glance(options[head].totals)}")
                for head, entry in entries.items()
            ),
            ("counted", counted_row([*entries.values()], learns=False)),
            ("tried", _tried(answer)),
            *(("names", line.strip("()")) for line in legend({v: k for k, v in titles.items()})),
        ],
    )


@dataclass(frozen=True, slots=True)
class _Short:
    """Short names of strategies and offers."""

    labels: Mapping[str, str]
    offers: Mapping[str, str]

    def simulated(self, option: Candidate) -> Simulated:
        """An option as other screens have it."""
        label = self.labels[option.result.strategy]
        gpus = counted(option.result.gpus, "GPU")
        return Simulated(
            name=f"{gpus} of {self.offers[display_name(option.case.cluster)]} with {label}",
            label=label,
            method=label,
            case=option.case,
            result=option.result,
            totals=option.totals,
        )

    def spends(self, option: Candidate, choice: Candidate) -> str:
        """An option with its days and money; what it has as the choice is not said again."""
        total, entry, taken = option.totals, self.simulated(option), self.simulated(choice)
        unit = "GPU-hours" if total.cost is None else total.currency
        name = entry.name
        if display_name(option.case.cluster) == display_name(choice.case.cluster):
            name = counted(option.result.gpus, "GPU")
            name += f" with {entry.label}" if entry.label != taken.label else ""
        return f"{name}, {amount(total.days)} days, {spent(total):,.0f} {unit}"

    def turning(self, answer: Recommendation, turn: BreakEven) -> str:
        """Where another option wins; prices of a GPU, bandwidths, step factors."""
        side = "above" if turn.above else "below"
        who = "the next one" if turn.winner == RUNNER_UP else turn.winner
        said = f"{turn.what} {side} {turn.shown_at} (now {turn.shown_now}): {who} wins"
        for option in (answer.choice, answer.runner_up, answer.rival):
            if option:
                offer = self.offers[display_name(option.case.cluster)]
                said = said.replace(offer_name(option.case.cluster), offer)
                said = said.replace(option.result.strategy, self.labels[option.result.strategy])
        return said


def _prices(space: Space, short: _Short) -> list[tuple[str, str]]:
    """Published prices of offers that name none: of whom, and of when."""
    offers = {key: replace(space.job, cluster=key) for key in space.clusters}
    loaded = {key: case.load()[0] for key, case in offers.items()}
    assumed = {
        key: fact
        for key, entry in loaded.items()
        for fact in entry.assumed
        if fact.path == "price_per_gpu"
    }
    if len(offers) == 1 or not assumed:
        return []
    said = (
        f"{short.offers[display_name(key)]} {fact.value} ({fact.source.partition(':')[0]})"
        for key, fact in assumed.items()
    )
    return [("prices", f"assumed: {', '.join(said)}")]


def _beside(answer: Recommendation, short: _Short) -> Iterator[tuple[str, str]]:
    """What else could be taken: a gamble, the next ones, and more speed for a little more money."""
    choice, wanted = answer.choice, answer.wanted
    assert choice is not None
    if answer.gamble:
        said = [short.spends(answer.gamble, choice), *odds(answer, answer.gamble)]
        yield "gamble", f"{_saved(answer)}: {'; '.join(said)}"
    undecided = "; undecided" if answer.undecided else ""
    if answer.runner_up:
        margin = _margin(answer, answer.runner_up)
        said = [f"{short.spends(answer.runner_up, choice)}{undecided}"]
        yield "next", f"{margin}: {'; '.join([*said, *odds(answer, answer.runner_up)])}"
    if answer.rival and answer.rival is not answer.runner_up:
        said = [short.spends(answer.rival, choice), *odds(answer, answer.rival)]
        yield "other", f"{_margin(answer, answer.rival)}: {'; '.join(said)}"
    best = best_trade(answer)
    if best and best is not answer.rival and wanted.want == "cheapest":
        more = f"for {best.spent / choice.spent - 1:.1%} more money"
        said = [f"{short.spends(best, choice)}, {more}", *odds(answer, best)]
        yield "sooner", "; ".join(said)


def odds(answer: Recommendation, option: Candidate) -> Iterator[str]:
    """The chances to miss the limits that may be missed."""
    for name, most, worst, chance in limits_of(option, answer.wanted):
        if worst is not None and worst > most:
            yield f"{chance:.0%} to miss the {name}"


def _stopped(answer: Recommendation) -> str:
    """What an interrupted plan leaves open."""
    seen = f"{answer.simulated:,} of {answer.candidates:,} candidates"
    return f"Stopped after {seen}: there may be a better one."


def _margin(answer: Recommendation, other: Candidate) -> str:
    """How far it is behind the choice."""
    assert answer.choice is not None
    margin = other.score(answer.wanted.want) / answer.choice.score(answer.wanted.want) - 1
    if margin < 0:
        return f"{-margin:.1%} {_AHEAD[answer.wanted.want]}"
    much = f"{margin:.1%}" if margin < 1 else f"{margin + 1:,.3g} times"
    return f"{much} {_BEHIND[answer.wanted.want][1]}"


_AHEAD = {"cheapest": "cheaper", "fastest": "faster", "least-energy": "less energy"}
_BEHIND = {
    "cheapest": ("is", "dearer"),
    "fastest": ("is", "slower"),
    "least-energy": ("takes", "more energy"),
}
"""A verb, and what is more."""


def turning(turns: Sequence[BreakEven], held: Sequence[Sensitivity]) -> list[str]:
    """Where another option wins, and what helps most."""
    said = [
        f"Where {turn.what} {'rises above' if turn.above else 'falls below'} {turn.shown_at}"
        f" (now {turn.shown_now}), {turn.winner} wins."
        for turn in turns
    ]
    if held:
        said.append(f"A tenth more of {held[0].change} gives {held[0].gain:.1%} more tokens/s.")
    return said


def best_trade(answer: Recommendation) -> Candidate | None:
    """The knee of the front, where it is no end of it that is the choice."""
    if answer.choice is None:
        return None
    best = answer.front[knee([option.totals for option in answer.front])]
    return None if best == answer.choice else best


def limits(answer: Recommendation, choice: Candidate) -> Iterator[str]:
    """Whether limits hold at the bad end of the interval, too."""
    for name, most, worst, chance in limits_of(choice, answer.wanted):
        unit = "days" if name == "deadline" else choice.totals.currency
        shown = f"the {name} of {amount(most)} {unit}"
        if worst is None:
            yield f"How sure {shown} is, is not known: there is no interval."
        elif worst <= most:
            yield f"It keeps {shown} at the bad end of its interval, too."
        else:
            bad = f"{amount(worst)} {unit}, and the chance to miss it is {chance:.0%}"
            yield f"It may miss {shown}: the bad end of its interval is {bad}."


def _saved(answer: Recommendation) -> str:
    """By how much the gamble is better."""
    option, want = answer.gamble, answer.wanted.want
    assert option is not None
    assert answer.choice is not None
    saved = 1 - option.score(want) / answer.choice.score(want)
    return f"{saved:.1%} {_AHEAD[want]}" if saved > 0 else "no better"


def nothing(answer: Recommendation) -> str:
    """Why there is no candidate with figures."""
    if answer.failed:
        return f"no candidate can be simulated: {answer.failed[0]}"
    return (
        f"none of {answer.large:,} candidates fits in memory; take more GPUs, another strategy"
        " (-s fsdp), --recompute full or less --headroom"
    )


def _over(answer: Recommendation) -> str:
    """The limits that nothing is within."""
    wanted = answer.wanted
    limits = [
        *([f"{wanted.deadline:g} days"] if wanted.deadline else []),
        *([f"a budget of {wanted.budget:,.6g}"] if wanted.budget else []),
        *([scaled(wanted.power, "W")] if wanted.power else []),
    ]
    return f"nothing is within {' and '.join(limits)}"


def looked(space: Space, answer: Recommendation) -> Iterator[str]:
    """What was looked at, and what was taken for granted."""
    yield (
        f"{answer.candidates:,} candidates{_sizes(answer)}: {answer.simulated:,} were simulated,"
        f" {answer.large:,}"
        f" do not leave {space.headroom:.0%} of the memory free, the others"
        f" {'were not looked at' if answer.interrupted else 'are slower or dearer by a bound'}"
    )
    if answer.unsearched:
        pairs = counted(answer.unsearched, "pair")
        yield f"{pairs} of cluster and strategy not shown: stopped early, as they cannot win"
    source = space.batch_source
    why = f" (assumed: {source}; --global-batch sets it)" if source else ""
    if not space.stacks:
        yield "one software stack was tried; --stack torchtitan,megatron-core tries two"
    near = "" if isinstance(space.job.global_batch, int) else ", or what GPUs divide well near it"
    yield f"global batch: {space.global_batch:,} samples a step{near}{why}"
    for name, reason in list(answer.impossible.items())[:3]:
        yield f"left out: {name}: {reason}"
    for reason in answer.failed[:3]:
        yield f"failed: {reason}"
    for name in answer.unknown:
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
    command = command_of(case, "run").replace("co2sim run", "-m realrun run --backend nccl", 1)
    command = command.replace(f" --gpus {case.gpus}", "")
    command = command.replace(f"--global-batch {case.global_batch}", f"--global-batch {batch}")
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {cluster.gpus_per_node} --rdzv-backend c10d"
        f" --rdzv-endpoint first-node:29500 {command} --out out"
    )


def plain(
    space: Space,
    answer: Recommendation,
    turns: Sequence[BreakEven],
    held: Sequence[Sensitivity],
    trainer: str = "",
) -> dict[str, Any]:
    """As plain values for JSON; `answer` has the sentences and the lines of the first screen."""
    choice, said = answer.choice, screen(space, answer, turns, trainer)
    return {
        "answer": [*said.answer, *(f"{name}: {text}" for name, text in said.rows)],
        "want": answer.wanted.want,
        "choice": choice and _option(choice, answer.wanted),
        "gamble": answer.gamble and _option(answer.gamble, answer.wanted),
        "runner_up": answer.runner_up and _option(answer.runner_up, answer.wanted),
        "rival": answer.rival and _option(answer.rival, answer.wanted),
        "best_trade": (best := best_trade(answer)) and _option(best, answer.wanted),
        "undecided": answer.undecided,
        "break_even": [asdict(turn) for turn in turns],
        "levers": [asdict(lever) for lever in held],
        "front": [_option(option, answer.wanted) for option in answer.front],
        "best": [_option(option, answer.wanted) for option in answer.best],
        "candidates": answer.candidates,
        "simulated": answer.simulated,
        "do_not_fit": answer.large,
        "left_out": answer.impossible,
        "failed": list(answer.failed),
        "not_measured": list(answer.unknown),
        "interrupted": answer.interrupted,
        "commands": list(commands(choice, answer.wanted)) if choice else [],
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
