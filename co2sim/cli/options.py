"""The options that several commands share, and the case that they describe."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from co2sim.common import convert
from co2sim.common.errors import OptionError, UnitError
from co2sim.common.units import parse
from co2sim.common.validation import parse_number
from co2sim.prediction.case import Case
from co2sim.prediction.step_factors import Goal
from co2sim.simulation.noise import Noise
from co2sim.studies.workers.engine import LOKY, Engine

Precision = Annotated[
    str | None,
    typer.Option(help="bf16, fp16 or fp32; default: bf16 if the GPU has it, else fp16."),
]
Accumulation = Annotated[
    int,
    typer.Option(
        parser=partial(convert.whole, "--accumulation"),
        metavar="N",
        help="Micro-steps per optimizer step.",
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        parser=partial(convert.whole, "--global-batch"),
        metavar="N",
        help="Samples per optimizer step over all GPUs; sets the accumulation.",
    ),
]
Tp = Annotated[
    int,
    typer.Option(
        "--tp",
        parser=partial(convert.whole, "--tp"),
        metavar="N",
        help="GPUs of a node that share every layer (tensor parallelism), and train on the same"
        " samples.",
    ),
]
Pp = Annotated[
    int,
    typer.Option(
        "--pp",
        parser=partial(convert.whole, "--pp"),
        metavar="N",
        help="Stages of a pipeline (1F1B), each with a part of the layers.",
    ),
]
Interleave = Annotated[
    int,
    typer.Option(
        "--interleave",
        parser=partial(convert.whole, "--interleave"),
        metavar="N",
        help="Chunks of layers of each stage of a pipeline.",
    ),
]
SequenceParallel = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel",
        help="Let GPUs that share layers divide the sequence between matrix products, too.",
    ),
]

Attention = Annotated[
    str,
    typer.Option(
        help="flash (one kernel, the scores are never kept) or eager (products and softmax, the"
        " scores are kept)."
    ),
]
Recompute = Annotated[
    str,
    typer.Option(
        help="Activations to recompute: none, selective (the scores of eager attention), or full"
        " (only the inputs of layers are kept)."
    ),
]
Checkpointing = Annotated[
    str,
    typer.Option(
        help="How full recomputation runs a layer again: non_reentrant (up to its last product, as"
        " PyTorch does) or reentrant (all of it, as Megatron-LM and DeepSpeed do)."
    ),
]
Loss = Annotated[
    str,
    typer.Option(
        help="Cross entropy: fused (one kernel on 16-bit logits) or eager (PyTorch's, in fp32)."
    ),
]
Optimizer = Annotated[str, typer.Option(help="adamw or sgd.")]


def pipeline(*, pp: Pp = 1, interleave: Interleave = 1) -> dict[str, int]:
    """Of a case: its pipeline."""
    return {"pp": pp, "interleave": interleave}


def number(flag: str) -> Callable[[str], float]:
    """A parser whose error names the option and the text."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"{flag} is {text!r}; it must be a number") from None

    return read


def whole(flag: str) -> Callable[[str], int]:
    """A parser whose error names the option and the text; 1e3 is 1000."""
    return partial(convert.whole, flag)


def seconds(flag: str, text: str, least: float = 0.0) -> float:
    """A length of time with its unit, above 0. Raises OptionError that names the option."""
    try:
        found = parse(text, "s")
    except UnitError as error:
        raise OptionError(f"{flag}: {error}") from None
    if found <= 0:
        raise OptionError(f"{flag} is {text!r}; it must be above 0")
    if found < least:
        raise OptionError(f"{flag} is {text!r}; it must be at least {least:g} s")
    return found


Cluster = Annotated[
    str, typer.Option("--cluster", "-c", help="Catalog name (`co2sim list clusters`) or TOML file.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Catalog name (`co2sim list models`), TOML file, or Hugging Face config.json.",
    ),
]
_STRATEGY = (
    "Name with options: co2:tau=48,worker=node, or 'co2(tau=48, worker=node)'"
    " (`co2sim list strategies`)."
)
Strategy = Annotated[str, typer.Option("--strategy", "-s", help=_STRATEGY)]
Strategies = Annotated[
    list[str],
    typer.Option("--strategy", "-s", help=f"{_STRATEGY} Repeatable: one after the other."),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        "-g",
        parser=whole("--gpus"),
        metavar="N",
        help="Number of GPUs; default: the whole cluster.",
    ),
]
MicroBatch = Annotated[
    int,
    typer.Option(
        parser=whole("--micro-batch"), metavar="N", help="Samples per GPU and micro-step."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help='Override any number of the cluster or, behind "model.", of the model:'
        ' --set inter.bandwidth="25 Gbit/s" --set model.seq_len=4096. Repeatable.',
    ),
]
Seed = Annotated[
    int, typer.Option(parser=whole("--seed"), metavar="N", help="Seed of jitter and stragglers.")
]
Jitter = Annotated[
    float,
    typer.Option(
        parser=number("--jitter"),
        metavar="N",
        help="Sigma of a lognormal factor on the time of every op; 0: none.",
    ),
]
Straggle = Annotated[
    float,
    typer.Option(
        parser=number("--straggle"),
        metavar="N",
        help="Sigma of a lognormal factor on the compute time of every node.",
    ),
]
NodeSpeed = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NODE=SPEED",
        help="Relative compute speed of one node: --node-speed 3=0.8. Repeatable.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        parser=whole("--rounds"),
        metavar="N",
        help="Rounds to average over; default: 1, or 10 with jitter.",
    ),
]
Fold = Annotated[
    bool, typer.Option(help="Let one rank stand for all equal ones, or simulate each.")
]
Interval = Annotated[
    str,
    typer.Option(
        help="How the 90 % interval is found: quick (no further simulation) or full (with every"
        " uncertain constant moved, where there are any)."
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        parser=whole("--jobs"),
        metavar="N",
        help="Processes; -1: one per core. Never more than cases, or than two per core.",
    ),
]
MAY_VARY = ("cluster", "model", "strategy")
"""What a sweep has to be given, unless it varies."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def pairs(texts: Iterable[str] | None, flag: str) -> dict[str, str]:
    """Read NAME=VALUE texts. Raises OptionError for others."""
    found = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name.strip() or not value.strip():
            raise OptionError(f"{flag} {text!r} is not NAME=VALUE")
        if name.strip() in found:
            raise OptionError(f"{flag} {name.strip()} is given twice")
        found[name.strip()] = value.strip()
    return found


def _noise(seed: int, jitter: float, straggle: float, node_speed: Iterable[str] | None) -> Noise:
    """What makes ranks differ."""
    speeds = {}
    for node, speed in pairs(node_speed, "--node-speed").items():
        if not node.isdecimal():
            raise OptionError(f"--node-speed {node}={speed}: {node!r} is not the number of a node")
        speeds[int(node)] = parse_number(f"speed of node {node}", speed)
    return Noise(node_speed=speeds, straggle=straggle, jitter=jitter, seed=seed)


def _job(  # noqa: PLR0913 - one parameter per option
    model: Model,
    *,
    micro_batch: MicroBatch = 1,
    accumulation: Accumulation = 1,
    tp: Tp = 1,
    sequence_parallel: SequenceParallel = False,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    attention: Attention = "flash",
    recompute: Recompute = "none",
    checkpointing: Checkpointing = "non_reentrant",
    loss: Loss = "fused",
    optimizer: Optimizer = "adamw",
    overrides: Overrides = None,
) -> Case:
    """The model and its batch; `Case` checks the values."""
    return Case(
        cluster="",
        model=model,
        strategy="",
        micro_batch=micro_batch,
        accumulation=accumulation,
        tp=tp,
        sequence_parallel=sequence_parallel,
        global_batch=global_batch,
        precision=precision,
        attention=attention,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        checkpointing=checkpointing,  # type: ignore[arg-type]
        loss=loss,  # type: ignore[arg-type]
        optimizer=optimizer,  # type: ignore[arg-type]
        overrides=pairs(overrides, "--set"),
    )


def _simulation(
    *,
    seed: Seed = 0,
    jitter: Jitter = 0.0,
    straggle: Straggle = 0.0,
    node_speed: NodeSpeed = None,
    rounds: Rounds = None,
    fold: Fold = True,
    interval: Interval = "quick",
) -> dict[str, Any]:
    """What only a simulation has."""
    noise = _noise(seed, jitter, straggle, node_speed)
    return {"noise": noise, "rounds": rounds, "fold": fold, "interval": interval}


def _single(cluster: Cluster, strategy: Strategy, gpus: Gpus = None) -> dict[str, Any]:
    """Where and how to train, where there is one of each."""
    return {"cluster": cluster, "strategy": strategy, "gpus": gpus}


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options but where and how; its parameter `job` receives the case."""
    return _sharing(command, "job", _job, pipeline, _simulation)


def case_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of one configuration; its parameter `case` receives it."""
    return _sharing(command, "case", _job, pipeline, _single, _simulation)


def sweep_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `case_options`, but what varies need not be given; see `refuse_varied`."""
    return _sharing(command, "case", _job, pipeline, _single, _simulation, optional=MAY_VARY)


def model_options(
    command: Callable[..., None], optional: Iterable[str] = ()
) -> Callable[..., None]:
    """Give a command the options of `_job` alone; `job` receives the case."""
    return _sharing(command, "job", _job, optional=optional)


def _sharing(
    command: Callable[..., None],
    target: str,
    make: Callable[..., Case],
    *further: Callable[..., Mapping[str, Any]],
    optional: Iterable[str] = (),
) -> Callable[..., None]:
    """`command` with the parameters of `make` and `further` in place of `target`.

    `make` gives the case, and each of `further` some of its fields. Texts that are `optional` are
    empty unless they are given.
    """
    own = [p for p in signature(command).parameters.values() if p.name != target]

    @wraps(command)
    def wrapper(**given: Any) -> None:
        def call(source: Callable[..., Any]) -> Any:
            return source(**{name: given.pop(name) for name in signature(source).parameters})

        made = call(make)
        for source in further:
            made = replace(made, **call(source))
        command(**{target: made}, **given)

    shared = [
        p.replace(default="") if p.name in optional else p
        for source in (make, *further)
        for p in signature(source).parameters.values()
    ]
    shared.sort(key=lambda p: p.default is not Parameter.empty)
    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*shared, *own)]
    wrapper.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


ToLossSteps = Annotated[
    int | None,
    typer.Option(
        parser=whole("--to-loss-steps"),
        metavar="N",
        help="Add time and cost to the loss that ddp reaches after N steps of this batch.",
    ),
]
StepsFactor = Annotated[
    list[str] | None,
    typer.Option(
        metavar="STRATEGY=N",
        help="Steps that a strategy needs for one of ddp to the same loss, in place of the"
        " measured number: --steps-factor co2=1.3. Repeatable.",
    ),
]


def goal(steps: int | None, factors: Iterable[str] | None) -> Goal:
    """What --to-loss-steps and --steps-factor say."""
    found = {}
    for text in factors or ():
        name, separator, value = text.rpartition("=")  # options of a strategy have signs, too
        if not separator or not name.strip():
            raise OptionError(f"--steps-factor {text!r} is not STRATEGY=N")
        if name in found:
            raise OptionError(f"--steps-factor {name} is given twice")
        found[name] = number(f"--steps-factor {name}")(value)
    return Goal(steps=steps, factors=found)


Name = Annotated[
    str,
    typer.Option(
        "--engine",
        help="Who runs the cases: loky (processes of this machine) or dask (workers of a"
        " scheduler, or some that are started here).",
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Of Dask (tcp://HOST:8786, or the .json file that it wrote); default: workers are"
        " started here, as many as --jobs says.",
    ),
]


def engine(context: typer.Context, name: str, scheduler: str | None, jobs: int) -> Engine:
    """Who runs the cases; without --jobs an engine of several machines takes all cores of this."""
    source = context.get_parameter_source("jobs")
    if name != LOKY.name and (source is None or source.name != "COMMANDLINE"):
        jobs = -1 if scheduler is None else 1
    return Engine(name, scheduler, jobs)
