"""The options that several commands share, and the case that they describe."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

import typer

from co2sim.catalog import Contents
from co2sim.common import convert
from co2sim.common.cli import refuse_twice
from co2sim.common.errors import OptionError
from co2sim.common.validation import parse_number
from co2sim.prediction.question import OPEN_BATCH, Question
from co2sim.prediction.step_factors import ONE_TRAINING, Goal, Project
from co2sim.prediction.whole import PUBLISHED, read_project
from co2sim.simulation.noise import Noise
from co2sim.strategies import parse
from co2sim.strategies.step import title
from co2sim.studies.pools import LOKY, Engine
from co2sim.training.optimizer import Optimizer
from co2sim.training.stack import Stack

Cluster = Annotated[
    str, typer.Option("--cluster", "-c", help="Catalog name (`co2sim list clusters`) or TOML file.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Catalog name (`co2sim list models`), TOML file, Hugging Face config.json, or a torch"
        " module: my_model.py:build.",
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
Jobs = Annotated[
    int,
    typer.Option(
        parser=partial(convert.whole, "--jobs"),
        metavar="N",
        help="Processes; -1: one per core. Never more than cases, or than two per core.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Full = Annotated[bool, typer.Option("--full", help="Print all figures, not only the answer.")]
Launch = Annotated[
    bool,
    typer.Option(
        "--launch",
        help="Print the script by which a trainer runs it; the answer goes to the other stream.",
    ),
]


def pairs(texts: Iterable[str] | None, flag: str) -> dict[str, str]:
    """Read NAME=VALUE texts. Raises OptionError for others."""
    values = {}
    for text in texts or ():
        name, separator, value = text.partition("=")
        if not separator or not name.strip() or not value.strip():
            raise OptionError(f"{flag} {text!r} is not NAME=VALUE")
        if name.strip() in values:
            raise OptionError(f"{flag} {name.strip()} is given twice")
        values[name.strip()] = value.strip()
    return values


class _Declared(NamedTuple):
    """A field of a record that is an option: its type, its default, what it is, how it is read."""

    hint: Any
    default: Any
    option: convert.Option
    reader: convert.Reader | None


def _declared(*owners: type[Any]) -> dict[str, _Declared]:
    """Every field of records that is an option."""
    options = {}
    for owner in owners:
        hints = get_type_hints(owner)
        for field in fields(owner):
            if "option" in field.metadata:
                default = None if field.default is MISSING else field.default
                option, reader = field.metadata["option"], convert.reader(owner, field.name)
                options[field.name] = _Declared(hints[field.name], default, option, reader)
    return options


_DECLARED = _declared(Question, Noise)


def flag(name: str, options: Mapping[str, _Declared] = _DECLARED) -> Any:
    """The option of a command line that a field of a record declares, by default of the case."""
    hint, default, declared, reader = options[name]
    spelled = declared.flags or (f"--{name.replace('_', '-')}",)
    kinds = get_args(hint) or (hint,)
    if not reader and (default is True or (default is None and bool in kinds)):
        return typer.Option(help=declared.help)  # with its --no-
    if not reader and get_origin(hint) in {Mapping, dict}:
        metavar = "NODE=SPEED" if name == "node_speed" else "NAME=VALUE"
        return typer.Option(*spelled, metavar=metavar, help=declared.help)
    numeric = convert.whole if int in kinds else convert.number if float in kinds else None
    read, metavar = (reader.read, reader.metavar) if reader else (numeric, "N")
    if read is None:
        return typer.Option(*spelled, help=declared.help)
    parser = partial(read, spelled[0])
    return typer.Option(*spelled, parser=parser, metavar=metavar, help=declared.help)


def _parameter(
    name: str, defaults: Mapping[str, Any], options: Mapping[str, _Declared] = _DECLARED
) -> Parameter:
    hint, default, _, reader = options[name]
    default = defaults.get(name, default)
    if reader:
        hint = Any
    elif get_origin(hint) in {Mapping, dict}:
        hint = list[str] | None
    elif get_origin(hint) is Literal or {Stack, Optimizer} & set(get_args(hint)):
        hint = str
    elif any(get_origin(kind) is Literal for kind in get_args(hint)):
        hint = str | None
    annotation: Any = Annotated[hint, flag(name, options)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _speeds(texts: Iterable[str] | None) -> dict[int, float]:
    speeds = {}
    for node, speed in pairs(texts, "--node-speed").items():
        if not node.isdecimal():
            raise OptionError(f"--node-speed {node}={speed}: {node!r} is not the number of a node")
        speeds[int(node)] = parse_number(f"speed of node {node}", speed)
    return speeds


def _from_files(
    context: typer.Context, paths: list[str] | None, but: Collection[str] = ()
) -> list[Any] | None:
    """Let what files of a trainer say stand for the options that are not given, nor in `but`.

    What they say is the value of the option.
    """
    if not paths:
        return None
    from co2sim.trainers.reading import lines, read_trainer  # noqa: PLC0415 - only where asked

    reading = read_trainer(*paths)
    options = {name: value for name, value in reading.options.items() if name != "overrides"}
    if isinstance(options.get("model"), Contents):
        options["model"] = options["model"].name
    several = {
        option.name for option in context.command.params if getattr(option, "multiple", False)
    }
    has = {option.name for option in context.command.params}.difference(but)
    values = {n: [value] if n in several else value for n, value in options.items() if n in has}
    context.meta[_READ] = reading.trainer
    values |= {n: partial(reading.refuse_unset, set(reading.unset) - {n}) for n in reading.unset}
    context.default_map = {**(context.default_map or {}), **values}
    chosen = [f"{name}={options[name]}" for name in options if name not in has]
    for line in (*lines(reading), *([f"chosen here: {', '.join(chosen)}"] if chosen else [])):
        typer.echo(line, err=True)
    return [reading]


_FROM = "from_"
_READ = "co2sim.trainer"


def trainer_read(context: typer.Context) -> str:
    """The trainer whose files are the question; empty where there are none."""
    return str(context.meta.get(_READ, ""))


def _from_option(but: Collection[str], flag: str) -> Parameter:
    def read(context: typer.Context, value: list[str] | None) -> list[Any] | None:
        return _from_files(context, value, but)

    option = typer.Option(
        flag,
        metavar="FILE",
        is_eager=True,
        callback=read,
        help="A file that a trainer reads: what it says stands for options that are not given."
        " torchtitan's TOML, arguments of Megatron-LM (script, YAML or log), DeepSpeed's JSON,"
        " Accelerate's YAML and others (`co2sim list trainers`). Repeatable; TRAINER:FILE"
        " names one, and FILE:PART one of its trainings or functions.",
    )
    annotation: Any = Annotated[list[str] | None, option]
    return Parameter(_FROM, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _case(values: dict[str, Any]) -> Question:
    """The case of these values, as a command line has them; `Question` checks them."""
    values = {"cluster": "", "strategy": "", **values}
    overrides = pairs(values.get("overrides"), "--set")
    values["overrides"] = overrides
    for reading in values.pop(_FROM, None) or ():
        reading.refuse_unset({n for n in reading.unset if "." not in n} | overrides.keys())
        values["overrides"] = reading.options["overrides"] | overrides
        model = reading.options.get("model")
        if isinstance(model, Contents) and values["model"] == model.name:
            values["model"] = model
        _say_instead(reading.options, values)
        values = reading.without_ruled_out(values)
    uneven = {field.name: values.pop(field.name) for field in fields(Noise) if field.name in values}
    if uneven:
        uneven["node_speed"] = _speeds(uneven["node_speed"])
        values["noise"] = Noise(**uneven)
    return Question(**values)


def _say_instead(of_files: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Name the options that were given and are others than those of the files."""
    others = {
        name: value
        for name, value in of_files.items()
        if name in values and name != "overrides" and values[name] not in ("", None, value)
    }
    if others:
        words = ", ".join(f"{name}={values[name]} (not {value})" for name, value in others.items())
        typer.echo(f"given instead: {words}", err=True)


def _cases(values: dict[str, Any]) -> list[Question]:
    """The case of each of several strategies."""
    strategies = values["strategy"]
    refuse_twice("strategy", (title(parse(text)) for text in strategies))
    case = _case({**values, "strategy": strategies[0]})
    return [replace(case, strategy=strategy) for strategy in strategies]


Decorator: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]

_REQUIRED = {"model": Model, "cluster": Cluster, "strategy": Strategy}
"""Options of a case without a default; the last two are of the group `place`."""
_SIMULATED = ("job", "pipeline", "simulation")
"""The groups of what is simulated, wherever it is."""


def case_options(
    *groups: str,
    target: str = "case",
    but: Collection[str] = (),
    optional: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
    from_: str = "--from",
) -> Decorator:
    """A decorator that gives a command the options of these groups of a case, but for some.

    They stand in place of its parameter `target`, which receives the case; where that is "cases"
    `--strategy` is repeatable, and it receives a list. Those of model, cluster and strategy that
    are `optional` are empty unless they are given. `defaults` stand before those of `Question`.
    """
    required = _REQUIRED | ({"strategy": Strategies} if target == "cases" else {})
    shared = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default="" if name in optional else Parameter.empty,
            annotation=annotation,
        )
        for name, annotation in required.items()
        if name == "model" or "place" in groups
    ]
    shared += [
        _parameter(name, defaults)
        for name, declared in _DECLARED.items()
        if declared.option.group in groups and name not in but
    ]
    if "job" in groups:
        shared.append(_from_option((*but, "strategy") if but else (), from_))
    shared.sort(key=lambda p: p.default is not Parameter.empty)
    make = _cases if target == "cases" else _case
    return lambda command: _with_parameters(command, target, shared, make)


one_case = case_options("place", *_SIMULATED)
"""Give a command all options of one configuration; its parameter `case` receives it."""
open_cases = case_options("place", *_SIMULATED, target="cases", defaults=OPEN_BATCH)
"""The same of one for each --strategy; `cases` receives them. A batch that is not given is open."""
solved_cases = case_options(
    "place", *_SIMULATED, target="cases", defaults=OPEN_BATCH, from_="--from-file"
)
"""The same for `co2sim solve`, whose --from is a number."""
open_job = case_options(*_SIMULATED, target="job", defaults=OPEN_BATCH)
"""The same but for where and how; `job` receives the case."""
model_options = case_options("job", target="job")
"""Give a command the options of a model and its batch; `job` receives the case."""


def record_options(
    record: type[Any],
    target: str,
    make: Callable[..., Any] | None = None,
    *,
    but: Collection[str] = (),
    **defaults: Any,
) -> Decorator:
    """A decorator that gives a command the options that a record declares, but for those in `but`.

    They stand in place of its parameter `target`, which receives the record, or what `make` makes
    of the values. `defaults` stand before those of the record. A value that is None is left out.
    """
    options = _declared(record)
    shared = [_parameter(name, defaults, options) for name in options if name not in but]

    def made(values: dict[str, Any]) -> Any:
        return (make or record)(**{n: value for n, value in values.items() if value is not None})

    return lambda command: _with_parameters(command, target, shared, made)


def _with_parameters(
    command: Callable[..., None],
    target: str,
    shared: Sequence[Parameter],
    make: Callable[[dict[str, Any]], Any],
) -> Callable[..., None]:
    """`command` with these parameters in place of `target`, which gets what is made of them."""
    others = [p for p in signature(command).parameters.values() if p.name != target]

    @wraps(command)
    def wrapper(**values: Any) -> None:
        command(**{target: make({p.name: values.pop(p.name) for p in shared})}, **values)

    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*shared, *others)]
    wrapper.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


ToTrain = Annotated[
    float | None,
    typer.Option(
        parser=partial(convert.amount, "--tokens"),
        metavar="N",
        help="Tokens that ddp would train, such as 1e12 or 1T; local updates need more.",
    ),
]
ToLossSteps = Annotated[
    int | None,
    typer.Option(
        parser=partial(convert.whole, "--to-loss-steps"),
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


WholeProject = Annotated[
    Project | None,
    typer.Option(
        "--project",
        parser=read_project,
        metavar="N",
        help="Times that a whole project takes as long as one training, for restarts, failed"
        f" attempts, evaluations and trials; or {PUBLISHED}: as published trainings took beside"
        " their prediction. Days, money and energy are those of the project.",
    ),
]


def _goal(values: dict[str, Any]) -> Goal:
    """What --to-loss-steps, --steps-factor and --project say."""
    factors: dict[str, float] = {}
    for text in values["steps_factor"] or ():
        name, separator, value = text.rpartition("=")  # options of a strategy have signs, too
        if not separator or not name.strip():
            raise OptionError(f"--steps-factor {text!r} is not STRATEGY=N")
        if name in factors:
            raise OptionError(f"--steps-factor {name} is given twice")
        factors[name] = convert.number(f"--steps-factor {name}", value)
    project = values["project"] or ONE_TRAINING
    return Goal(steps=values.get("to_loss_steps"), factors=factors, project=project)


def _optional(name: str, annotation: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


_FACTORS = (_optional("steps_factor", StepsFactor), _optional("project", WholeProject))


def factor_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --steps-factor and --project; its parameter `goal` receives what they say."""
    return _with_parameters(command, "goal", _FACTORS, _goal)


def goal_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `factor_options`, and --to-loss-steps."""
    steps = _optional("to_loss_steps", ToLossSteps)
    return _with_parameters(command, "goal", [steps, *_FACTORS], _goal)


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


Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="Write one HTML page, too, with all data inside."
    ),
]
