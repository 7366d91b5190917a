"""`co2sim show`, `run` and `trace`: their options, and what they print."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from co2sim.cli import options, output
from co2sim.common.cli import keeping, print_json
from co2sim.common.errors import OptionError
from co2sim.common.files import write_atomically
from co2sim.common.tables import console, print_lines
from co2sim.prediction import driver
from co2sim.prediction.evidence import nearest
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.step_factors import Goal
from co2sim.prediction.step_memory import StepMemory
from co2sim.prediction.totals import result_to_dict
from co2sim.prediction.verdict import Verdict, verdicts
from co2sim.report.bundle import check
from co2sim.report.text import totals
from co2sim.report.text.beside import print_beside
from co2sim.report.text.cases import of_strategies
from co2sim.report.text.launch import aside, launch_text, print_launch
from co2sim.report.text.memory import print_step_memory
from co2sim.report.text.result import print_details, print_evidence, print_verdicts
from co2sim.report.text.screen import print_screen
from co2sim.studies.beside import Beside, Together, file_and_count, read_beside


@options.one_case
def show(case: Question) -> None:
    """Print the schedule: what every rank does in one round."""
    print(_with_numbers(case).stage().schedule)


def _with_numbers(case: Question) -> Question:
    """The case with numbers for "auto"; says of which batch they are, as `run` has another one."""
    chosen = driver.resolve_auto(case)
    if chosen.strategy != case.strategy:
        print(
            f"chosen for micro-batch {chosen.micro_batch} x {chosen.accumulation or 1}, recompute"
            f" {chosen.recompute}; `co2sim run` has another batch unless you give it the same",
            file=sys.stderr,
        )
    return chosen


_Evidence = Annotated[
    bool,
    typer.Option(
        "--evidence",
        help="Add the published runs that are most like it, and where step factors are from.",
    ),
]
_Memory = Annotated[
    bool,
    typer.Option(
        "--memory",
        help="Add what a GPU holds over a step, and what other options would save of it.",
    ),
]
_Others = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE[:N]",
        help="Add what the job and N others on the same fabric lose to each other: a TOML file of"
        " options (model, gpus, ...; strategy is ddp unless it says another), or"
        " one that a trainer reads. Repeatable.",
    ),
]


@options.open_cases
@options.goal_options
def run(  # noqa: PLR0913 - one argument per option
    context: typer.Context,
    cases: list[Question],
    goal: Goal,
    *,
    tokens: totals.Tokens = None,
    evidence: _Evidence = False,
    memory: _Memory = False,
    beside: _Others = None,
    full: options.Full = False,
    launch: options.Launch = False,
    report: options.Report = None,
    json_: options.Json = False,
) -> None:
    """Simulate configurations: days, money, speed, memory; several strategies beside each other.

    With several strategies --json prints a list.
    """
    check("--report", report)
    files, meetings = _meetings(cases, beside or [])
    results = [driver.run(case, progress=None) for case in cases]
    judged = verdicts(cases, results, driver.run, goal)
    trainer = options.trainer_read(context)
    screen = of_strategies(cases, results, goal, tokens, judged, trainer)
    shared = [meeting.meet() for meeting in meetings] if report or json_ else []
    if report:
        about = {"cases": cases, "results": results, "goal": goal, "tokens": tokens}
        study = output.study(
            **about, screen=screen, comparisons=(), verdicts=judged, beside=shared, files=files
        )
        write_atomically({report: output.study_page(study)})
    if json_:
        more = {"evidence": evidence, "memory": memory}
        shared = shared or [[] for _ in cases]
        _print_json(
            cases, results, judged, goal, tokens, shared, **more, launch=trainer if launch else None
        )
        return
    with aside(launch=launch):
        print_screen(screen, output.more(full=full, files=[report]), whole=full)
        if full:
            print_lines(console(), "")
            print_details(cases, results, goal, tokens)
        elif memory:
            print_lines(console(), "")
            print_step_memory(results, list(map(StepMemory.of, cases, results)))
        sys.stdout.flush()
        for index, meeting in enumerate(meetings):
            with keeping("without what jobs beside each other lose"):
                print_beside(shared[index] if shared else meeting.meet(), files)
        if evidence:
            print_lines(console(), "")
            for case, result in zip(cases, results, strict=True):
                print_evidence(case, result, named=len(cases) > 1)
            totals.print_worth(console(), results, goal)
        if full:
            print_verdicts([one for one in judged if one])
    if launch:
        print_launch(list(zip(cases, results, strict=True)), trainer)


def _meetings(cases: Sequence[Question], texts: Sequence[str]) -> tuple[list[str], list[Together]]:
    """Of each case with all others that `--beside` names, and the files of these."""
    others = [
        (file_and_count(text)[0], other) for text in texts for other in read_beside(text, cases[0])
    ]
    files = [file for file, _ in others]
    names = ["", *(f"--beside {file}" for file in files)]
    return files, [
        Together.of([case, *(other for _, other in others)], names) for case in cases if others
    ]


def _print_json(
    cases: Sequence[Question],
    results: Sequence[Result],
    judged: Sequence[Verdict | None],
    goal: Goal,
    tokens: float | None,
    shared: Sequence[Sequence[Beside]],
    *,
    evidence: bool,
    memory: bool,
    launch: str | None,
) -> None:
    """JSON; `launch` is the trainer whose file asks, None where no script is wanted."""
    answers = [
        result_to_dict(case, result, goal, tokens)
        | ({"verdict": asdict(verdict)} if verdict else {})
        | ({"step_memory": StepMemory.of(case, result).to_dict()} if memory else {})
        | ({"evidence": [asdict(e) for e in nearest(case, result)]} if evidence else {})
        | ({} if launch is None else {"launch": launch_text(case, result, launch)})
        | ({"beside": [asdict(job) for job in jobs]} if jobs else {})
        for case, result, verdict, jobs in zip(cases, results, judged, shared, strict=True)
    ]
    print_json(answers[0] if len(answers) == 1 else answers)


@options.one_case
def trace(
    case: Question,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="A .json file for Perfetto, or .jsonl with one span a line."
        ),
    ] = Path("trace.json"),
) -> None:
    """Simulate, and write the timeline of every traced rank."""
    if out.suffix not in {".json", ".jsonl"}:
        raise OptionError(f"--out {out}: the file must end in .json (Perfetto) or .jsonl")
    schedule, traced = driver.trace(_with_numbers(case), progress=None)
    if out.suffix == ".jsonl":
        text = "".join(f"{line}\n" for line in traced.to_json_lines())
    else:
        text = json.dumps(traced.to_chrome(schedule))
    write_atomically({out: text.encode()})
    opens = "" if out.suffix == ".jsonl" else "; open it at https://ui.perfetto.dev"
    print(f"{len(traced.spans)} spans of {traced.rounds} rounds in {out}{opens}")
