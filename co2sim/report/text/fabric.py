"""What `co2sim fabric` says: the network of each strategy, a table of all, and plain values."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console

from co2sim.common.tables import print_lines, print_table
from co2sim.common.units import counted, figures, number, timespan
from co2sim.prediction.figures import asked
from co2sim.prediction.ownership import SETS, split
from co2sim.prediction.step_factors import NO_GOAL, Goal
from co2sim.prediction.totals import DAY
from co2sim.report.text.answer import (
    Simulated,
    batch_row,
    labels,
    learning_row,
    legend,
    marked,
    setup,
)
from co2sim.report.text.screen import Screen
from co2sim.report.text.totals import short
from co2sim.studies.fabric import BILLION, OFF, Network, Networks, Training

_HERE = "*"
_MILLION = 1e6


def screen(answer: Networks, goal: Goal = NO_GOAL) -> Screen:
    """The cheapest training, a row for each strategy with its network, and what they rest on."""
    chosen = [answer.chosen(strategy) for strategy in answer.strategies]
    names = labels(answer.strategies)
    entries = [
        Simulated(
            name=names[trained.strategy],
            label=names[trained.strategy],
            method=names[trained.strategy],
            case=trained.case,
            result=trained.result,
        )
        for trained in chosen
    ]
    results = [trained.result for trained in chosen]
    misfits = any(not result.fits_in_memory for result in results)
    learning, turns, network = learning_row(entries, goal), _turns(answer), _tried(answer)
    stay = [
        *(("refused", f"{name} runs on no network: {why}") for name, why in answer.refused.items()),
        *learning,
        *(turns if _scattered(answer) else []),
        *([network] if answer.better else []),
    ]
    return Screen(
        answer=[*_sentences(answer), setup([job(answer, goal)], results)],
        columns=[*_COLUMNS, *(["memory"] if misfits else [])],
        table=[
            [
                *_row(answer, trained, marked(names[trained.strategy], trained.result)),
                *([trained.result.memory_word] if misfits else []),
            ]
            for trained in chosen
        ],
        left=2,
        legend=legend(
            {names[trained.strategy]: trained.result.strategy for trained in chosen},
            results=results,
        ),
        rows=[
            *stay,
            *(row for row in (network, *_unwired(answer), *turns) if row not in stay),
            ("counted", _counted(answer)),
            ("batch", batch_row(results)),
        ],
        least=len(stay),
    )


_COLUMNS = (
    "strategy",
    "network",
    "leaf",
    "loses",
    "USD/GPU",
    "saves",
    "time",
    "USD",
)


def _row(answer: Networks, trained: Training, name: str) -> list[str]:
    network = trained.network
    return [
        name,
        network.name,
        counted(network.leaf_nodes, "node"),
        _lost(trained),
        f"{network.usd:,.0f}",
        _short((answer.full.usd - network.usd) * answer.gpus),
        _time(trained),
        _usd(trained),
    ]


def _sentences(answer: Networks) -> Iterator[str]:
    names = labels(answer.strategies)
    chosen: dict[str, list[str]] = {}
    misfits: dict[str, str] = {}
    for strategy in answer.strategies:
        trained = answer.chosen(strategy)
        if trained.result.fits_in_memory:
            name = f"{trained.network.name} ({trained.network.usd:,.0f} USD a GPU)"
            chosen.setdefault(name, []).append(names[strategy])
        else:
            misfits[names[strategy]] = trained.result.misfit.lower()
    said = []
    if chosen:
        networks = ", and ".join(f"{name} for {' and '.join(of)}" for name, of in chosen.items())
        loses, which = _percent(answer.tried.loses), counted(answer.planned, "network")
        if (ran := len(answer.networks)) < answer.planned:
            said.append("Not all networks were simulated.")
            which = f"{ran:,} of {which}"
        said.append(
            f"Of {which} the cheapest that loses at most {loses} of the best speed is {networks}."
        )
    if misfits:
        verdicts = " or ".join(sorted(set(misfits.values())))
        lacking = ", ".join(misfits)
        said.append(f"No network is recommended for what {verdicts} in memory: {lacking}.")
    yield " ".join(said)
    best = answer.cheapest
    if best is None or best.usd is None:
        if chosen:
            yield "No training that fits in memory has a known cost: give --steps-factor."
        return
    yield (
        f"The cheapest training is {names[best.strategy]} with {best.network.name}: {_time(best)},"
        f" {figures(best.usd)} USD owned."
    )


def job(answer: Networks, goal: Goal) -> str:
    """What is trained, and where; the network is said elsewhere."""
    trained = answer.trainings[0]
    result, case = trained.result, trained.case
    amount = f"{short(answer.tokens or BILLION)} {result.unit}s"
    if answer.tokens is None:
        amount += " (default)"
    if answer.tokens is None and goal.steps is not None:
        amount = f"{goal.steps:,} steps of ddp"
    others = {n: t for n, t in split(case.overrides)[1].items() if n not in trained.network.changes}
    changed = ", ".join(f"{name}={text}" for name, text in others.items())
    where = result.place.partition(", with ")[0]
    return f"{amount} of {result.model} on {where}{f', with {changed}' if changed else ''}"


def _tried(answer: Networks) -> tuple[str, str]:
    """What networks cost, and what others are compared with."""
    costs, full = sorted(network.usd for network in answer.networks), answer.full
    whole = f"{_money(full.usd * answer.gpus)}, {_percent(full.share)} of the cluster"
    said = [
        f"{costs[0]:,.0f} to {costs[-1]:,.0f} USD a GPU",
        f"saves: beside {full.name} ({whole})",
    ]
    if answer.better:
        ways = "--ports" if full.changes["fabric.rails"] == "true" else "--rails or --ports"
        ports = full.changes["fabric.switch_ports"]
        said.append(f"{answer.better} cannot be wired with {ports} ports a switch: try {ways}")
    elif full.nics != answer.cards:
        said.append(f"the cluster has {answer.cards} cards a node")
    gpus = answer.gpus_per_node
    if uneven := [n for n in answer.tried.nics or () if gpus % n and n % gpus]:
        shared = " or ".join(map(str, uneven))
        said.append(f"{gpus} GPUs are taken to share {shared} cards evenly")
    if answer.near:
        of = f"{answer.near} of {counted(len(answer.trainings), 'case')}"
        loses = _percent(answer.tried.loses)
        off = f"as such predictions are {_percent(OFF)} off"
        said.append(f"{of} may lose more or less than {loses}, {off}")
    return "network", "; ".join(said)


def _unwired(answer: Networks) -> list[tuple[str, str]]:
    """How many are left out, and why the first is."""
    if not answer.unwired:
        return []
    name, reason = answer.unwired[0]
    count = counted(len(answer.unwired), "network")
    return [("left out", f"{count} cannot be wired, such as {name}: {reason}")]


def _scattered(answer: Networks) -> bool:
    """Whether neighbours stand anywhere, or paths are hashed."""
    fabrics = [trained.case.load()[0].value.fabric for trained in answer.trainings]
    return any(its and (not its.packed or its.paths == "hashed") for its in fabrics)


def _turns(answer: Networks) -> list[tuple[str, str]]:
    """What other leaves would do; nothing where no network has uplinks."""
    if all(network.oversubscription is None for network in answer.networks):
        return []
    if _scattered(answer):
        text = "packed jobs on spread paths lose less, as their rings cross a leaf once"
    else:
        text = (
            "rings of packed jobs cross a leaf once; scattered ones (--set"
            " fabric.placement=scattered) and hashed paths (--set fabric.paths=hashed) lose more"
        )
    return [("turns", text)]


def _counted(answer: Networks) -> str:
    tried = answer.tried
    return (
        f"USD: what owning costs meanwhile, of {tried.years:g} years at"
        f" {_percent(tried.utilization)} utilization (co2sim own; --set {SETS}nic='2000 USD', say);"
        " errors of a strategy are alike on all networks, those of two are not (co2sim run has"
        " intervals); not: other jobs on the same switches"
    )


def print_details(out: Console, answer: Networks) -> None:
    """All networks: what they are made of, and every strategy on each."""
    names = list(dict.fromkeys(part for network in answer.networks for part in network.parts))
    rows = [
        [
            network.name,
            f"{network.leaf_nodes:,}",
            " + ".join(f"{count:,}" for count in network.tiers),
            f"{network.links:,}",
            *(f"{network.parts[n].usd:,.0f}" if n in network.parts else "0" for n in names),
            f"{network.usd:,.0f}",
            _percent(network.share),
            number(network.watts),
        ]
        for network in answer.networks
    ]
    heads = [f"{name}, USD" for name in names]
    ports = answer.full.changes["fabric.switch_ports"]
    title = f"networks of {counted(answer.gpus, 'GPU')}, of switches with {ports} ports"
    columns = [
        "network",
        "leaf",
        "switches",
        "links",
        *heads,
        "USD/GPU",
        "of cluster",
        "W/GPU",
    ]
    print_table(out, title, columns, rows, left=1)
    for strategy in answer.strategies:
        here = answer.chosen(strategy)
        recommended = here if here.result.fits_in_memory else None
        taken = labels(trained.result.strategy for trained in answer.of(strategy))
        varies = len(taken) > 1
        rows = [
            [
                f"{trained.network.name}{f' {_HERE}' if trained is recommended else ''}",
                f"{trained.network.usd:,.0f}",
                number(trained.network.watts),
                f"{trained.result.tokens_per_s:,.0f}",
                "-" if trained.factor is None else f"{trained.factor:.3g}",
                _lost(trained),
                _time(trained),
                _usd(trained),
                *([taken[trained.result.strategy]] if varies else []),
            ]
            for trained in answer.of(strategy)
        ]
        unit = here.result.unit
        columns = ["network", "USD/GPU", "W/GPU", f"{unit}s/s", "steps for one of ddp", "loses"]
        print_table(out, strategy, [*columns, "time", "USD", *(["as"] * varies)], rows, left=1)
    loses = _percent(answer.tried.loses)
    print_lines(out, f"{_HERE} the cheapest network that loses at most {loses}")
    print_lines(out, *(f"not wired: {name}: {reason}" for name, reason in answer.unwired))


def plain(answer: Networks) -> dict[str, Any]:
    """As plain values for JSON."""
    best = answer.cheapest
    return {
        "answer": " ".join(_sentences(answer)),
        "gpus": answer.gpus,
        "tokens": answer.tokens,
        "loses": answer.tried.loses,
        "years": answer.tried.years,
        "utilization": answer.tried.utilization,
        "full": answer.full.name,
        "networks_planned": answer.planned,
        "near_what_may_be_lost": answer.near,
        "networks": [_plain_network(network) for network in answer.networks],
        "not_wired": [{"network": name, "why": reason} for name, reason in answer.unwired],
        "trainings": [_plain_training(trained) for trained in answer.trainings],
        "refused": answer.refused,
        "chosen": {
            strategy: {
                **_plain_training(trained),
                "saves_usd": (answer.full.usd - trained.network.usd) * answer.gpus,
            }
            if (trained := answer.chosen(strategy)).result.fits_in_memory
            else None
            for strategy in answer.strategies
        },
        "cheapest": best and _plain_training(best),
    }


def _plain_network(network: Network) -> dict[str, Any]:
    return {
        "network": network.name,
        **asdict(network),
        "usd_per_gpu": network.usd,
        "watts_per_gpu": network.watts,
    }


def _plain_training(trained: Training) -> dict[str, Any]:
    result = trained.result
    return {
        "strategy": trained.strategy,
        "network": trained.network.name,
        "as": result.strategy,
        "tokens_per_s": result.tokens_per_s,
        "steps_factor": trained.factor,
        "tokens_per_s_to_the_loss": trained.pace,
        "lost": trained.lost,
        "days": trained.days,
        "usd": trained.usd,
        "fits_in_memory": result.fits_in_memory,
        **asked(result),
    }


def _lost(trained: Training) -> str:
    return f"{100 * trained.lost:.1f} %"


def _time(trained: Training) -> str:
    return "-" if trained.days is None else timespan(trained.days * DAY)


def _usd(trained: Training) -> str:
    return "-" if trained.usd is None else figures(trained.usd)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _money(usd: float) -> str:
    return f"{usd / 1e6:.3g} million USD" if usd >= _MILLION else f"{usd:,.0f} USD"


def _short(usd: float) -> str:
    return f"{usd / 1e6:.3g}M" if usd >= _MILLION else f"{usd:,.0f}"
