"""The options that several commands share, and the case that they describe."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from co2sim.common import convert
from co2sim.common.errors import OptionError, UnitError
from co2sim.common.units import parse
from co2sim.common.validation import parse_number
from co2sim.models.stack import Stack
from co2sim.prediction.case import OPEN_BATCH, Case
from co2sim.prediction.step_factors import Goal
from co2sim.simulation.noise import Noise
from co2sim.studies.pools import LOKY, Engine


def number(flag: str) -> Callable[[str], float]:
    """A parser whose error names the option and the text."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise OptionError(f"{flag} is {text!r}; it must be a number") from None

    return read


def amount(flag: str) -> Callable[[str], float]:
    """A parser of large numbers: 1e12, 1T, 300B, 50k."""
    return partial(convert.amount, flag)


def money(flag: str) -> Callable[[str], float]:
    """The same of an amount of money, that may have `$` before it or a currency behind it."""
    return lambda text: convert.amount(flag, _CURRENCY.sub("", text.strip()) or text)


_CURRENCY = re.compile(r"^\$\s*|\s*(USD|EUR)$")


def whole(flag: str) -> Callable[[str], int]:
    """A parser whose error names the option and the text; 1e3 is 1000."""
    return partial(convert.whole, flag)


def seconds(flag: str, text: str, least: float = 0.0) -> float:
    """A length of time with its unit, above 0. Raises OptionError that names the option."""
    try:
        found = parse(text, "s")
    except UnitError as error:
        if text.strip().replace(".", "", 1).isdecimal():
            raise OptionError(
                f"{flag} is {text!r}, without a unit; write '{text.strip()} days', or hours (h),"
                " minutes or seconds (s)"
            ) from None
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
        for one in fields(owner):
            if "option" in one.metadata:
                default = None if one.default is MISSING else one.default
                option, reader = one.metadata["option"], convert.reader(owner, one.name)
                options[one.name] = _Declared(hints[one.name], default, option, reader)
    return options


_DECLARED = _declared(Case, Noise)


def flag(name: str, options: Mapping[str, _Declared] = _DECLARED) -> Any:
    """The option of a command line that a field of a record declares, by default of the case."""
    hint, default, declared, reader = options[name]
    spelled = declared.flags or (f"--{name.replace('_', '-')}",)
    if reader:
        read = partial(reader.read, spelled[0])
        return typer.Option(*spelled, parser=read, metavar=reader.metavar, help=declared.help)
    kinds = get_args(hint) or (hint,)
    if default is True:
        return typer.Option(help=declared.help)  # with its --no-
    if get_origin(hint) in {Mapping, dict}:
        metavar = "NODE=SPEED" if name == "node_speed" else "NAME=VALUE"
        return typer.Option(*spelled, metavar=metavar, help=declared.help)
    if int in kinds:
        return typer.Option(*spelled, parser=whole(spelled[0]), metavar="N", help=declared.help)
    if float in kinds:
        return typer.Option(*spelled, parser=number(spelled[0]), metavar="N", help=declared.help)
    return typer.Option(*spelled, help=declared.help)


def _parameter(
    name: str, defaults: Mapping[str, Any], options: Mapping[str, _Declared] = _DECLARED
) -> Parameter:
    hint, default, _, reader = options[name]
    default = defaults.get(name, default)
    if reader:
        hint = Any
    elif get_origin(hint) in {Mapping, dict}:
        hint = list[str] | None
    elif get_origin(hint) is Literal or Stack in get_args(hint):
        hint = str
    elif any(get_origin(kind) is Literal for kind in get_args(hint)):
        hint = str | None
    annotation: Any = Annotated[hint, flag(name, options)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _speeds(texts: Iterable[str] | None) -> dict[int, float]:
    found = {}
    for node, speed in pairs(texts, "--node-speed").items():
        if not node.isdecimal():
            raise OptionError(f"--node-speed {node}={speed}: {node!r} is not the number of a node")
        found[int(node)] = parse_number(f"speed of node {node}", speed)
    return found


def _case(given: dict[str, Any]) -> Case:
    """The case of these values, as a command line has them; `Case` checks them."""
    given = {"cluster": "", "strategy": "", **given}
    given["overrides"] = pairs(given.get("overrides"), "--set")
    uneven = {one.name: given.pop(one.name) for one in fields(Noise) if one.name in given}
    if uneven:
        uneven["node_speed"] = _speeds(uneven["node_speed"])
        given["noise"] = Noise(**uneven)
    return Case(**given)


_PLACE = {"model": Model, "cluster": Cluster, "strategy": Strategy}
"""Options without a default."""


def _sharing(
    command: Callable[..., None],
    target: str,
    groups: Collection[str],
    *,
    but: Collection[str] = (),
    optional: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Callable[..., None]:
    """`command` with the options of `groups` in place of its parameter `target`, a `Case`.

    It has none that are in `but`. Those of `_PLACE` that are `optional` are empty unless they are
    given. `defaults` stand before those of `Case`.
    """
    shared = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default="" if name in optional else Parameter.empty,
            annotation=annotation,
        )
        for name, annotation in _PLACE.items()
        if name == "model" or "place" in groups
    ]
    shared += [
        _parameter(name, defaults)
        for name, declared in _DECLARED.items()
        if declared.option.group in groups and name not in but
    ]
    shared.sort(key=lambda p: p.default is not Parameter.empty)
    return _with_parameters(command, target, shared, _case)


def record_options(
    record: type[Any],
    target: str,
    make: Callable[..., Any] | None = None,
    *,
    but: Collection[str] = (),
    **defaults: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
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
    own = [p for p in signature(command).parameters.values() if p.name != target]

    @wraps(command)
    def wrapper(**given: Any) -> None:
        command(**{target: make({p.name: given.pop(p.name) for p in shared})}, **given)

    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*shared, *own)]
    wrapper.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options but where and how; its parameter `job` receives the case.

    What is not given of its batch is open.
    """
    return _sharing(command, "job", ("job", "pipeline", "simulation"), defaults=OPEN_BATCH)


def case_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of one configuration; its parameter `case` receives it."""
    return _sharing(command, "case", ("job", "pipeline", "place", "simulation"))


def sweep_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `case_options`, but what varies need not be given, and the batch is open; see `sweep`."""
    groups = ("job", "pipeline", "place", "simulation")
    return _sharing(command, "case", groups, optional=MAY_VARY, defaults=OPEN_BATCH)


def plan_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `job_options`, but for what `plan` chooses, and for what only one simulation has."""
    chosen = ("micro_batch", "accumulation", "recompute")
    divided = ("tp", "sequence_parallel", "cp", "ep", "pp", "interleave")
    return _sharing(command, "job", ("job",), but=(*chosen, *divided))


def calibrate_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `job_options`, for runs whose rows say more; simulations are those of one round."""
    return _sharing(command, "job", ("job", "pipeline"), optional=("model",))


def own_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `case_options`, but model and strategy need not be given, and the batch is open."""
    groups = ("job", "pipeline", "place", "simulation")
    return _sharing(command, "case", groups, optional=("model", "strategy"), defaults=OPEN_BATCH)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a model and its batch; `job` receives the case."""
    return _sharing(command, "job", ("job",))


def explore_options(command: Callable[..., None]) -> Callable[..., None]:
    """As `job_options`, but the model need not be given, and one simulation has no options."""
    return _sharing(command, "job", ("job", "pipeline"), optional=("model",), defaults=OPEN_BATCH)


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


Clusters = Annotated[
    list[str],
    typer.Option("--cluster", "-c", help="Catalog name or TOML file. Repeatable: one panel each."),
]
ManyStrategies = Annotated[
    list[str], typer.Option("--strategy", "-s", help="As in `run`. Repeatable: one line each.")
]
Counts = Annotated[
    str | None,
    typer.Option(
        "--gpus", "-g", help="Counts, such as 8,16,32; default: one node, doubled up to all."
    ),
]
Varied = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        help="A number of the cluster, the model or the batch, and its values: --vary"
        ' inter.bandwidth="25 Gbit/s, 100 Gbit/s". A panel for each. Repeatable: all combinations.',
    ),
]
Published = Annotated[
    Path | None,
    typer.Option(help="Published cells to compare with the prediction (papers/*/results.toml)."),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="Write one HTML page, too, with all data inside."
    ),
]
