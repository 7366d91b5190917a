"""`realrun train`: train a small model on real data with any strategy."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common.errors import OptionError
from co2sim.common.files import check_writable
from co2sim.schedule.schedule import Layout
from co2sim.strategies import parse, with_options
from co2sim.strategies.step import title
from realrun.cli import options as launching
from realrun.cli.train_rank import check_out, resumed, run
from realrun.lab.time_dilation import DILATION, dilation
from realrun.train.algorithm_registry import pairs
from realrun.train.settings import TrainSettings, check, check_estimate

_WARMUP = 20
"""Steps, if there are twice as many."""


def train(  # noqa: PLR0913, PLR0917 - one argument per option
    task: Annotated[
        str,
        typer.Option(
            "--task",
            "-t",
            help="text: a GPT on the characters of Python's standard library. masked_text: what"
            " is hidden in them, with a transformer that looks both ways. digits: a convolutional"
            " network on scikit-learn's digits. segmentation: the class of every pixel where some"
            " of them are. points: clouds of points on surfaces, reconstructed.",
        ),
    ] = "text",
    strategy: Annotated[
        str,
        typer.Option("--strategy", "-s", help="As in `co2sim run`: ddp, co2:tau=12, zeropp ..."),
    ] = "ddp",
    tau: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Steps between averages: sets tau of the strategy. auto: of co2, the shortest"
            " round that hides its averages, measured.",
        ),
    ] = None,
    outer: Annotated[
        str,
        typer.Option(
            metavar="OPTIONS",
            help="Options of the outer step, which do not affect the schedule. co2: momentum, lr,"
            " gap (constant or gap_aware), penalty, clip; slowmo, diloco: momentum, lr;"
            " overlap_local_sgd: pull, momentum. As in momentum=0.5,gap=gap_aware.",
        ),
    ] = "",
    size: Annotated[str, typer.Option(help="tiny, mini, small, medium or large.")] = "small",
    context: Annotated[
        int,
        typer.Option(
            parser=options.whole("--context"),
            metavar="N",
            show_default=False,
            help="Characters in a sample of text; default: 64 to 256, by size.",
        ),
    ] = 0,
    steps: Annotated[
        int, typer.Option(parser=options.whole("--steps"), metavar="N", help="Optimizer steps.")
    ] = 600,
    stop: Annotated[
        int,
        typer.Option(
            parser=options.whole("--stop"),
            metavar="N",
            show_default=False,
            help="End after this step with a checkpoint, to continue with --resume.",
        ),
    ] = 0,
    batch: Annotated[
        int,
        typer.Option(
            parser=options.whole("--batch"),
            metavar="N",
            help="Samples per step over all ranks, which share them equally.",
        ),
    ] = 32,
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    lr: Annotated[
        float,
        typer.Option(parser=options.number("--lr"), metavar="N", help="Highest learning rate."),
    ] = 3e-3,
    final_lr: Annotated[
        float,
        typer.Option(
            parser=options.number("--final-lr"),
            metavar="N",
            help="Fraction of the highest learning rate at the last step, after half a cosine.",
        ),
    ] = 0.1,
    warmup: Annotated[
        int | None,
        typer.Option(
            parser=options.whole("--warmup"),
            metavar="N",
            help="Steps until lr is reached; default: 20, or half of all where those are fewer.",
        ),
    ] = None,
    momentum: Annotated[
        float,
        typer.Option(
            parser=options.number("--momentum"), metavar="N", help="Of sgd; adamw's beta1."
        ),
    ] = 0.9,
    weight_decay: Annotated[
        float,
        typer.Option(
            parser=options.number("--weight-decay"), metavar="N", help="Weight decay of matrices."
        ),
    ] = 0.01,
    clip_grad: Annotated[
        float,
        typer.Option(
            parser=options.number("--clip-grad"),
            metavar="N",
            help="Clip the norm of a worker's gradient to this; 0: no clipping.",
        ),
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(
            parser=options.whole("--seed"), metavar="N", help="Seed of weights and of samples."
        ),
    ] = 0,
    log_every: Annotated[
        int,
        typer.Option(
            parser=options.whole("--log-every"), metavar="N", help="Steps between rows of the log."
        ),
    ] = 10,
    eval_every: Annotated[
        int,
        typer.Option(
            parser=options.whole("--eval-every"),
            metavar="N",
            help="Steps between validations, of the mean of all workers; local updates wait for"
            " the end of a round. 0: only at the end.",
        ),
    ] = 100,
    evaluate: Annotated[
        str,
        typer.Option(
            help="during: at once, off the clock. after: once training is over, so that no average"
            " that is under way gets free time.",
        ),
    ] = "during",
    checkpoint_every: Annotated[
        int,
        typer.Option(
            parser=options.whole("--checkpoint-every"),
            metavar="N",
            help="Steps between checkpoints, of which two are kept; 0: only at the end.",
        ),
    ] = 100,
    resume: Annotated[  # noqa: FBT002
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --out, if any.")
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option(
            parser=options.whole("--from-step"),
            metavar="N",
            help="With --resume: continue from the checkpoint after this step, not from the last.",
        ),
    ] = None,
    estimate: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--estimate",
            help="Also measure L, sigma^2, zeta^2 and the gap, which `co2analysis bound` and `tau`"
            " take, at three points of the training.",
        ),
    ] = False,
    describe: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--describe",
            help="Print the model of task text as a file for co2sim, and do not train.",
        ),
    ] = False,
    nproc: launching.Nproc = None,
    backend: launching.BackendName = "gloo",
    deadline: launching.Deadline = "60 s",
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder: log, figure, parameters, checkpoints. All ranks see it."
        ),
    ] = Path("out"),
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Train a small model on real data, with checkpoints, a log and a figure of the loss."""
    settings = TrainSettings(
        task=task,  # type: ignore[arg-type]
        strategy=_with_tau(strategy, tau),
        size=size,
        context=context,
        steps=steps,
        stop=stop,
        batch=batch,
        optimizer=optimizer,  # type: ignore[arg-type]
        lr=lr,
        final_lr=final_lr,
        warmup=min(_WARMUP, steps // 2) if warmup is None else warmup,
        momentum=momentum,
        weight_decay=weight_decay,
        clip_grad=clip_grad,
        outer=pairs(outer),
        seed=seed,
        log_every=log_every,
        eval_every=eval_every,
        evaluate=evaluate,  # type: ignore[arg-type]
        checkpoint_every=checkpoint_every,
    )
    if describe:
        if task != "text":
            raise OptionError("--describe needs --task text, the task whose model is a transformer")
        print(settings.shape.toml(), end="")
        return
    going_on = resumed(from_step, given=resume)
    means = launching.known_backend(backend)
    limit = launching.checked_deadline(deadline)
    launching.checked_nproc(nproc)
    _check_clock()
    if nproc is not None:
        check(settings, Layout(1, nproc))
        if estimate:
            check_estimate(settings, Layout(1, nproc), resume=resume)
        check_out(settings, out, nproc, going_on)
    check_writable(out)
    from realrun.cli import ranks  # noqa: PLC0415 - torch

    how = ranks.RankSettings(means, limit, nproc)
    if nproc is not None:
        raise typer.Exit(ranks.start(how, sys.argv[1:], training=True))

    def work(rank: ranks.Rank) -> None:
        run(rank, settings, out, resume=going_on, estimate=estimate, as_json=json_)

    ranks.as_rank(how, None, work)


def _check_clock() -> None:
    """Raise OptionError where the lab is slower than its clock says."""
    if dilation() > 1:
        raise OptionError(
            f"{DILATION} is {dilation()}, and training goes by the clock of the machine; build the"
            " lab with --dilation 1"
        )


def _with_tau(strategy: str, tau: str | None) -> str:
    """The strategy with another tau. Raises OptionError when it has none, or its own one."""
    if tau is None:
        return strategy
    if tau != "auto":
        options.whole("--tau")(tau)
    if "tau" in strategy:
        raise OptionError(f"--tau {tau}, and --strategy {strategy} gives another one")
    return title(with_options(parse(strategy), {"tau": tau}))
