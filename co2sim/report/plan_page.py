"""The page of `co2sim plan`: what to buy, what comes near it, and what would change that."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import altair as alt

from co2sim.common.units import counted, scaled
from co2sim.prediction.question import Question
from co2sim.report import charts, sections
from co2sim.report.chart_style import (
    ROW,
    TEXT,
    Rows,
    Spec,
    data,
    line_at,
    picking,
    spec,
)
from co2sim.report.html import Figure, Page, PageSection, Timelines
from co2sim.report.rounds import last_round
from co2sim.report.tables import Answered, Table, options
from co2sim.report.text import plan, totals
from co2sim.studies.candidates import Candidate, Space
from co2sim.studies.grid import display_name, offer_name, short_names
from co2sim.studies.plan import Recommendation
from co2sim.studies.sensitivity import BreakEven, Sensitivity
from co2sim.studies.table import to_frame

_PARTS = {
    "useful": "useful work",
    "checkpoint": "stops for checkpoints",
    "lost": "work that is done again",
    "restart": "restarts",
    "waiting": "waiting for nodes",
}
"""Shares of the time where parts fail."""


def breaks(turns: Iterable[BreakEven]) -> Table:
    """Where each number turns the answer."""
    rows = [
        [
            turn.what,
            turn.shown_now,
            f"{'above' if turn.above else 'below'} {turn.shown_at}",
            turn.winner,
        ]
        for turn in turns
    ]
    return Table(("number", "now", "turns", "who wins there"), rows)


def useful(named: Mapping[str, Answered]) -> Table | None:
    """What becomes of the time, and energy, a column for each; None where neither is known."""
    rows = []
    shares = [_shares(entry) for entry in named.values()]
    for part, words in _PARTS.items():
        if any(shares):
            cells = [f"{parts_of[part]:.2%}" if parts_of else "-" for parts_of in shares]
            rows.append([f"share of the time: {words}", *cells])
    trained = [entry.totals for entry in named.values() if entry.totals]
    if any(total.power_w is not None for total in trained):
        power = ["-" if total.power_w is None else scaled(total.power_w, "W") for total in trained]
        rows.append(["average power, at the meter", *power])
        rows.append(["energy, kWh", *(totals.ranged(total, "energy_kwh") for total in trained)])
    if any(total.co2e_kg is not None for total in trained):
        rows.append(["carbon, kg CO2e", *(totals.ranged(total, "co2e_kg") for total in trained)])
    heads = [
        f"{text}: {entry.strategy}" if text else entry.strategy for text, entry in named.items()
    ]
    return Table(("of the training", *heads), rows) if rows else None


def _shares(entry: Answered) -> dict[str, float] | None:
    if entry.totals is None or entry.totals.failures is None:
        return None
    shares = entry.totals.failures.shares
    return {name: getattr(shares, name) for name in _PARTS}


_MAX_BARS = 40
"""Of one chart."""
_MAX_ROWS = 200
"""Of the table of the best by cluster and strategy, and of the front."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan as it was found, with what would change it; `command` repeats it all.

    `interrupted` says that it was stopped, whether before the choice was sure or behind it.
    """

    space: Space
    found: Recommendation
    turns: Sequence[BreakEven]
    levers: Sequence[Sensitivity]
    interrupted: bool
    command: str

    @cached_property
    def best(self) -> list[Candidate]:
        """The best by cluster and strategy, as many as are shown."""
        return list(self.found.best[:_MAX_ROWS])

    @cached_property
    def front(self) -> list[Candidate]:
        """What none beats in days and money, as much as is shown."""
        return list(self.found.front[:_MAX_ROWS])

    @cached_property
    def offers(self) -> dict[str, str]:
        """What the page calls each offer, as the first screen does."""
        return short_names(self.space.clusters)

    @cached_property
    def options(self) -> list[Candidate]:
        """What is shown, once: the best, what none beats, and the gamble."""
        options = list(self.best)
        for option in (*self.front, *([self.found.gamble] if self.found.gamble else [])):
            if option not in options:
                options.append(option)
        return options

    @cached_property
    def shown(self) -> list[Answered]:
        """Every option of the page."""
        return [
            Answered(
                cluster=self.offers[display_name(option.case.cluster)],
                strategy=option.result.strategy,
                case=option.case,
                result=option.result,
                totals=option.totals,
            )
            for option in self.options
        ]

    def answered(self, option: Candidate) -> Answered:
        """An option of those that are shown."""
        return self.shown[self.options.index(option)]

    @cached_property
    def marked(self) -> dict[str, Answered]:
        """What the chart names: the choice, what comes near, the best trade, the gamble's odds."""
        options = [self.found.choice, self.found.runner_up]
        best, gamble = plan.best_trade(self.found), self.found.gamble
        marked = dict(self.named)
        if best and best in self.front and best not in options:
            marked["best trade"] = self.answered(best)
        if gamble:
            words = "\n".join(["gamble", *plan.odds(self.found, gamble)])
            marked[words] = self.answered(gamble)
        return marked

    @cached_property
    def named(self) -> dict[str, Answered]:
        """The choice and the runner-up, as far as there are."""
        options = {"choice": self.found.choice, "runner-up": self.found.runner_up}
        return {name: self.answered(c) for name, c in options.items() if c}


def page(planned: Planned) -> Page:
    """It takes two simulations: the timelines of the choice and of the runner-up."""
    groups = _groups(planned)
    named = list(planned.named.values())
    job, clusters = planned.space.job, planned.space.clusters
    return Page(
        screen=plan.screen(planned.space, planned.found, planned.turns),
        doubts=_doubts(planned),
        sections=[
            _options(planned),
            _best(planned),
            _turns(planned),
            sections.time(groups, _timelines(planned)),
            sections.memory(groups),
            sections.gains({named[0].title: planned.levers} if named else {}),
            _useful(planned),
            sections.trust(planned.shown, named or planned.shown[:1]),
            sections.inputs_of(
                (planned.offers[display_name(c)], replace(job, cluster=c)) for c in clusters
            ),
            PageSection("looked", "What was looked at", notes=_looked(planned)),
        ],
        commands=_commands(planned),
        files=_files(planned),
    )


def _doubts(planned: Planned) -> list[str]:
    """What an interrupt left out; that the choice is not sure, the answer says itself."""
    if not planned.interrupted or planned.found.interrupted:
        return []
    return ["This plan was interrupted: what would change the answer was not looked at."]


def _groups(planned: Planned) -> dict[str, list[Answered]]:
    """By cluster, the options that have bars, the number of GPUs in their names."""
    groups = sections.by_cluster(
        replace(entry, strategy=f"{entry.strategy}, {counted(entry.result.gpus, 'GPU')}")
        for entry in planned.shown[: min(len(planned.best), _MAX_BARS)]
    )
    return dict(sorted(groups.items()))


def _options(planned: Planned) -> PageSection:
    """Days against money: all options of the page."""
    wanted, shown = planned.found.wanted, planned.shown
    several = len({entry.cluster for entry in shown}) > 1
    limits = {"days": wanted.deadline, "cost": wanted.budget}
    chart = charts.front(
        shown,
        [entry.strategy for entry in shown],
        planned.marked,
        {name: most for name, most in limits.items() if most is not None},
        hours=True,
        offers=several,
    )
    figures = []
    dotted = " Dotted lines are limits." if any(limits.values()) else ""
    if chart:
        coded = "A colour for each offer, a shape for each strategy. " if several else ""
        note = (
            f"{coded}The size is the number of GPUs. Lines are 90 % intervals of the speed,"
            " together with the range of the price. Nothing is cheaper and faster than what the"
            f" dashed line joins.{dotted}{picking([entry.strategy for entry in shown])}"
            f" {_offers(planned)}."
        )
        label_ = "money, or GPU-hours, by days, a point for each option"
        figures.append(Figure("", note, label_, chart, options(planned.front)))
    return PageSection("options", "Days and money", figures=figures)


def _offers(planned: Planned) -> str:
    """What each offer is, where its name does not say it."""
    named = {
        planned.offers[display_name(cluster)]: loaded.value.name
        for cluster in planned.space.clusters
        for loaded in [replace(planned.space.job, cluster=cluster).load()[0]]
    }
    return "; ".join(f"{short}: {name}" for short, name in named.items() if short != name)


def _best(planned: Planned) -> PageSection:
    """The best by cluster and strategy, as the terminal has it."""
    note = "The first is the choice, the second the runner-up." if planned.named else ""
    left = len(planned.found.best) - len(planned.best)
    note += f" {left:,} more are left out." if left else ""
    figure = Figure("", note, table=options(planned.best))
    return PageSection("best", "The best by cluster and strategy", figures=[figure])


def _turns(planned: Planned) -> PageSection:
    """Where the runner-up becomes the better one."""
    turns = [
        replace(turn, what=_shortly(turn.what, planned), winner=_shortly(turn.winner, planned))
        for turn in planned.turns
    ]
    if not turns:
        return PageSection("turns", "What would change the answer")
    figure = Figure(
        "Where another one wins",
        "Each number alone: from what it is now (the dashed line) to the value at which the"
        " answer turns.",
        "how many times what it is now each number is where the answer turns",
        _turns_chart(turns),
        breaks(turns),
    )
    return PageSection("turns", "What would change the answer", figures=[figure])


def _shortly(text: str, planned: Planned) -> str:
    """With the names that the page has for offers."""
    for cluster in planned.space.clusters:
        text = text.replace(offer_name(cluster), planned.offers[display_name(cluster)])
    return text


def _turns_chart(turns: Sequence[BreakEven]) -> Spec:
    """How many times each number is what it is now where the answer turns."""
    rows: Rows = [
        {
            "what": f"{turn.what}\n{turn.shown_now} → {turn.shown_at}: {turn.winner} wins",
            "now": 1.0,
            "times": turn.at / turn.now,
            "place": row,
        }
        for row, turn in enumerate(turns)
    ]
    log = alt.Scale(type="log", nice=False, padding=16)
    x = alt.X("times:Q", title="times what it is now", scale=log, axis=alt.Axis(format="~r"))
    now = alt.X("now:Q", title="times what it is now", scale=log)
    base = alt.Chart(data(rows)).encode(y=alt.Y("place:O", title=None, axis=None))
    tips = [alt.Tooltip("what:N", title="now, and where it turns")]
    words = base.mark_text(
        align="left", dy=-26, color=TEXT, fontSize=11, lineBreak="\n", limit=alt.expr("width")
    )
    layers = [
        line_at(now, 1.0),
        base.mark_rule(strokeWidth=3, color=TEXT).encode(x=now, x2="times:Q", tooltip=tips),
        base.mark_point(size=90, filled=True, color=TEXT, opacity=1).encode(x=x, tooltip=tips),
        words.encode(x=alt.value(0), text=alt.Text("what:N")),
    ]
    return spec(alt.layer(*layers), 3 * ROW * len(rows))


def _timelines(planned: Planned) -> Timelines | None:
    """The choice's above the runner-up's."""
    rounds = {
        f"{words}: {entry.title}": last_round(entry.case)
        for words, entry in planned.named.items()
        if entry.case.pp == 1
    }
    if not rounds:  # pipelines have no round that all ranks follow
        return None
    return Timelines("One rank of each.", rounds, charts.timeline(rounds.values()))


def _useful(planned: Planned) -> PageSection:
    """Failures and energy of the choice and the runner-up, as far as they are known."""
    named: Mapping[str, Answered] = planned.named or {"": planned.shown[0]}
    table = useful(named)
    return PageSection(
        "useful",
        "Failures and energy",
        figures=[Figure("", table=table)] if table else [],
        notes=totals.basis_lines(
            [entry.case for entry in named.values()],
            [entry.totals for entry in named.values()],
        ),
    )


def _looked(planned: Planned) -> list[str]:
    lines = list(plan.looked(planned.space, planned.found))
    said = totals.worth((entry.result for entry in planned.shown), planned.found.wanted.goal)
    return [*lines, said] if said else lines


def _commands(planned: Planned) -> list[str]:
    """The plan, the choice in full, and its trial on two nodes; what each does is a comment."""
    choice = planned.found.choice
    if choice is None:
        return [planned.command]
    lines = plan.commands(choice, planned.found.wanted)
    said = ["# {}\n{}".format(*line.split(": ", 1)) for line in lines]
    return [f"# the plan\n{planned.command}", *said]


def _files(planned: Planned) -> dict[str, tuple[str, str]]:
    answer = planned.found
    cases: list[Question] = [entry.case for entry in planned.shown]
    results = [entry.result for entry in planned.shown]
    wanted = answer.wanted
    frame = to_frame(cases, results, goal=wanted.goal, tokens=wanted.tokens)
    plain = plan.plain(planned.space, answer, planned.turns, planned.levers)
    return {
        "plan.csv": ("text/csv", frame.to_csv(index=False)),
        "plan.json": ("application/json", json.dumps(plain, indent=1)),
    }
