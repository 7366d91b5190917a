"""`co2sim plan`: its options."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from co2sim.cli import options
from co2sim.common import convert
from co2sim.common.cli import refuse_twice
from co2sim.common.errors import OptionError, UnitError
from co2sim.common.units import parse as quantity
from co2sim.prediction.case import Case
from co2sim.prediction.choose import RECOMPUTES
from co2sim.report.bundle import check
from co2sim.studies.candidates import STRATEGIES, Axes, Objective, Space
from co2sim.studies.grid import offer_name

_DAY = 86400.0
_WANTS = ("cheapest", "fastest", "least-energy")


@options.plan_options
def plan(  # noqa: PLR0913, PLR0917 - one argument per option
    context: typer.Context,
    job: Case,
    cluster: Annotated[
        list[str],
        typer.Option("--cluster", "-c", help="Catalog name or TOML file: an offer. Repeatable."),
    ],
    tokens: Annotated[
        float | None,
        typer.Option(
            parser=options.amount("--tokens"),
            metavar="N",
            help="Tokens that ddp would train, such as 1e12 or 1T; local updates need more.",
        ),
    ] = None,
    to_loss_steps: Annotated[
        int | None,
        typer.Option(
            parser=options.whole("--to-loss-steps"),
            metavar="N",
            help="Instead of --tokens: the steps after which ddp has the loss.",
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="What to try; repeatable. Default (over several sites also DiLoCo between them):"
            f" {'; '.join(STRATEGIES)}.",
        ),
    ] = None,
    want: Annotated[
        str | None,
        typer.Option(
            help="cheapest, fastest or least-energy; default: cheapest, or fastest where no cluster"
            " has a price."
        ),
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(help='The longest that training may take: "30 days".')
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            parser=options.money("--budget"),
            metavar="N",
            help="The most that it may cost, in the currency of the clusters' prices.",
        ),
    ] = None,
    power: Annotated[
        str | None,
        typer.Option(help='The most power that it may draw at the meter: "500 kW".'),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", "-g", help="Counts, such as 64,128; default: one node, doubled up to all."
        ),
    ] = None,
    tp: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="GPUs of a node that share every layer (tensor parallelism), such as 4 or 1,2,4;"
            " default: powers of two up to a node.",
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            help="Whether GPUs that share layers divide the sequence, too; default: they do."
        ),
    ] = None,
    cp: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="GPUs that divide every sequence (context parallelism); default: 1, and powers of"
            " two that leave each 4,096 tokens or more (32,768 with torchtitan).",
        ),
    ] = None,
    ep: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="GPUs that divide the experts of a layer (expert parallelism); default: powers of"
            " two that do, up to 64.",
        ),
    ] = None,
    pp: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Stages of a pipeline (1F1B); default, with ddp and zero1: powers of two and what"
            " divides the layers, up to 32.",
        ),
    ] = None,
    interleave: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Chunks of layers of each stage of a pipeline; default: 1, and the fewest and the"
            " most of up to 8 that divide the layers.",
        ),
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(help="Samples per GPU and micro-step, such as 1,2,4; default: powers of two."),
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(help="Activations to recompute, as in `run`, or several: none,full/2,norms."),
    ] = ",".join(RECOMPUTES),
    headroom: Annotated[
        str,
        typer.Option(
            help="Memory to leave free. Some published runs needed twice what is predicted."
        ),
    ] = "10%",
    steps_factor: options.StepsFactor = None,
    jobs: options.Jobs = 1,
    engine: options.Name = "loky",
    scheduler: options.Scheduler = None,
    report: options.Report = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Find what to buy, or how to run what there is: the best of all candidates."""
    from co2sim.cli import plan_answer  # noqa: PLC0415 - scipy and rich

    refuse_twice("cluster", cluster)
    _refuse_one_name(cluster)
    check("--report", report)
    who = options.engine(context, engine, scheduler, jobs)
    stacks = [part.strip() for part in job.stack.split(",")] if isinstance(job.stack, str) else []
    if len(stacks) > 1 and not all(stacks):
        raise OptionError(f"--stack is {job.stack!r}, which has an empty name")
    refuse_twice("stack", stacks)
    space = Space(
        job=replace(job, stack=stacks[0]) if stacks else job,
        stacks=tuple(stacks) if len(stacks) > 1 else (),
        clusters=tuple(cluster),
        strategies=tuple(strategy) if strategy else STRATEGIES,
        gpus=gpus,
        micro_batches=_wholes("--micro-batch", micro_batch),
        recomputes=tuple(part.strip() for part in recompute.split(",")),
        axes=Axes(
            tp=_wholes("--tp", tp),
            cp=_wholes("--cp", cp),
            ep=_wholes("--ep", ep),
            pp=_wholes("--pp", pp),
            interleave=_wholes("--interleave", interleave),
            sequence_parallel=sequence_parallel,
        ),
        headroom=_share("--headroom", headroom),
    )
    wanted = Objective(
        want=_want(want, space),
        tokens=_tokens(tokens, to_loss_steps, space),
        budget=budget,
        deadline=None if deadline is None else options.seconds("--deadline", deadline) / _DAY,
        power=None if power is None else _watts(power),
        goal=options.goal(None, steps_factor),
    )
    plan_answer.planning(space, wanted, who, report, as_json=json_)


def _refuse_one_name(clusters: list[str]) -> None:
    """Refuse offers that an answer could not tell apart."""
    named: dict[str, str] = {}
    for cluster in clusters:
        other = named.setdefault(offer_name(cluster), cluster)
        if other != cluster:
            raise OptionError(
                f"{other} and {cluster} are both called {offer_name(cluster)!r}; give each offer"
                " another name before the colon"
            )


def _tokens(tokens: float | None, steps: int | None, space: Space) -> float:
    """What ddp would train: given, or a number of steps of the global batch."""
    if (tokens is None) == (steps is None):
        raise OptionError("give --tokens 1e12, say, or --to-loss-steps; not both")
    if tokens is not None:
        return tokens
    assert steps is not None
    if steps < 1:
        raise OptionError(f"--to-loss-steps is {steps}; it must be 1 or more")
    model = replace(space.job, cluster=space.clusters[0]).load()[1].value
    return float(steps) * space.global_batch * model.tokens


def _want(given: str | None, space: Any) -> Any:
    """What is wanted: by default the cheapest, where prices are known."""
    if given is None:
        loaded = replace(space.job, cluster=space.clusters[0]).load()[0].value
        return "fastest" if loaded.price_per_gpu is None else "cheapest"
    if given not in _WANTS:
        raise OptionError(f"--want is {given!r}; it must be one of {', '.join(_WANTS)}")
    return given


def _wholes(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    return tuple(sorted(convert.whole(flag, part.strip()) for part in text.split(",")))


def _share(flag: str, text: str) -> float:
    """A share as "10%" or 0.1."""
    bare = text.strip().removesuffix("%")
    return options.number(flag)(bare) / (100 if bare != text.strip() else 1)


def _watts(text: str) -> float:
    try:
        return quantity(text, "W")
    except UnitError as error:
        raise OptionError(f"--power: {error}") from None
