"""`co2sim explore`: a page to play with."""

import secrets
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from co2sim.cli import options
from co2sim.common import convert
from co2sim.common.cli import command_line, keeping
from co2sim.common.errors import OptionError
from co2sim.common.files import write_atomically
from co2sim.common.validation import between
from co2sim.prediction import driver
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.step_factors import Goal
from co2sim.report.bundle import check
from co2sim.report.text import totals

if TYPE_CHECKING:
    from co2sim.report.explore.exploration import Exploration

_MAX_PORT = 65_535
_MIN, _MAX = 1e-4, 0.5
"""Of the tolerance: below, everything is simulated; above, nothing is left."""
_CLUSTER, _MODEL = "cloud-100g", "gpt2-xl"
_STRATEGIES = ("ddp", "zero3", "zeropp", "co2:tau=12,delay=1,worker=node")
"""What the server's page begins with."""
_WITH_SERVER = ("micro_batch", "inter.latency", "wan.latency")
"""Sliders that a page without a server has only with --vary: each multiplies all positions."""

_Varied = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        help="With --out: the positions of a slider: --vary strategy.tau=4,12,48. Repeatable;"
        " others have usual ones.",
    ),
]
_Tolerance = Annotated[
    float,
    typer.Option(
        parser=partial(convert.number, "--tolerance"),
        metavar="N",
        help="With --out: more positions are simulated until throughput between them is off by"
        " at most N (0.01: 1 %) at random ones, or until 20,000 are simulated.",
    ),
]


@options.case_options("job", "pipeline", target="job", optional=("model",), defaults=OPEN_BATCH)
@options.goal_options
def explore(  # noqa: PLR0913, PLR0917 - one argument per option
    job: Question,
    goal: Goal,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="Catalog name or TOML file.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="As in `run`. Repeatable: one line each."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", "-g", metavar="N,N", help="GPUs; several vary, as with --vary."),
    ] = None,
    over: _Varied = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html",
            help="Write a page that needs no server, with positions simulated before.",
        ),
    ] = None,
    tolerance: _Tolerance = 0.01,
    jobs: options.Jobs = -1,
    port: Annotated[
        int,
        typer.Option(
            parser=partial(convert.whole, "--port"),
            metavar="N",
            help="Of the server; 0: any that is free.",
        ),
    ] = 0,
    tokens: totals.Tokens = None,
) -> None:
    """Play: a server on this machine that asks the simulator, or a page without one (--out)."""
    if gpus is not None and "," in gpus:
        if any(text.startswith("gpus=") for text in over or ()):
            raise OptionError("--gpus has several values, and so has --vary gpus; give one of them")
        over, gpus = [*(over or ()), f"gpus={gpus}"], None
    size = None if gpus is None else convert.whole("--gpus", gpus)
    if out is None:
        _serve(job, cluster, strategy, size, over, port, goal, tokens)
        return
    check("--out", out)
    tolerance = between("--tolerance", tolerance, _MIN, _MAX)
    for flag, value in (("--cluster", cluster), ("--model", job.model), ("--strategy", strategy)):
        if not value:
            raise OptionError(f"{flag} is missing; a page without a server needs it")
    job = replace(job, cluster=cluster or "", gpus=size)
    from co2sim.report.explore.exploration import Exploration  # noqa: PLC0415 - rich

    question = Exploration(job, tuple(strategy or ()), tokens, goal)
    _write(question, options.pairs(over, "--vary"), out, tolerance, jobs)


def _write(
    question: "Exploration", varied: Mapping[str, str], out: Path, tolerance: float, jobs: int
) -> None:
    """Simulate the grid, and write the page."""
    from co2sim.report.explore.exploration import controls, varying  # noqa: PLC0415
    from co2sim.report.explore.grid import build  # noqa: PLC0415 - numpy, only when needed
    from co2sim.report.explore.page import begin, exactness, static_page  # noqa: PLC0415 - Altair

    made = {slider.path: slider for slider in controls(question)}
    made = {path: slider for path, slider in made.items() if path not in _WITH_SERVER}
    for path, values in varied.items():
        made[path] = varying(question, path, values)
    shown = list(made.values())
    places = range(len(question.strategies))
    cases = [question.case(index, begin(shown)) for index in places]
    first = [(case, driver.run(case)) for case in cases]  # what cannot be is said before others
    grid = build(question, shown, tolerance, jobs, partial(print, file=sys.stderr))
    command = command_line("co2sim")
    write_atomically({out: static_page(question, grid, first, command)})
    print(exactness(grid)[0])
    print(f"page  {out}")
    if grid.ended:
        raise KeyboardInterrupt(f"{out} holds the {grid.simulated:,} cases that were done")


def _serve(  # noqa: PLR0917 - what a page begins with
    job: Question,
    cluster: str | None,
    strategy: list[str] | None,
    gpus: int | None,
    over: list[str] | None,
    port: int,
    goal: Goal,
    tokens: float | None,
) -> None:
    """Serve until control-C."""
    if over:
        raise OptionError(f"--vary {over[0]}: it makes sliders of a page with --out")
    between("--port", port, 0, _MAX_PORT)
    _check_server()
    from co2sim.report.explore.asking import OPTIONS, PARTS, Files, PageView, question_of  # noqa: PLC0415
    from co2sim.report.explore.server import serve  # noqa: PLC0415 - uvicorn

    cluster, model = cluster or _CLUSTER, str(job.model) or _MODEL
    files = Files(
        clusters={cluster: cluster},
        models={model: model},
        parts=frozenset(text for path, text in job.overrides.items() if path in PARTS),
    )
    changed = {name: getattr(job, name) for name in OPTIONS}
    usual = {field.name: field.default for field in fields(Question)} | OPEN_BATCH
    view = PageView(
        cluster=cluster,
        model=model,
        strategies=tuple(strategy or _STRATEGIES),
        tokens=tokens,
        options={name: str(v) for name, v in changed.items() if v != usual[name]},
        set=dict(job.overrides),
        gpus=gpus,
    )
    question_of(view, files, goal).case(0, {}).load()
    token = secrets.token_urlsafe(24)
    with keeping("the server has ended"):
        serve(files, goal, view, token, port, partial(print, flush=True))


def _check_server() -> None:
    """Raise OptionError where the extra is missing."""
    if not all(map(find_spec, ("altair", "vl_convert", "starlette", "uvicorn", "pebble"))):
        raise OptionError("the explorer's server needs more: pip install '.[explore]'")
