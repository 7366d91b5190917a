"""The command that repeats a case."""

import shlex
from collections.abc import Iterator
from dataclasses import fields

from co2sim.case import Case
from co2sim.cluster import Cluster
from co2sim.errors import OptionError
from co2sim.noise import QUIET
from co2sim.step_factors import NO_GOAL, Goal
from co2sim.strategies.step import title
from co2sim.workload import Model

_SWITCHES = {"fold": "--no-fold", "sequence_parallel": "--sequence-parallel"}
_NAMED = {"cluster", "model", "strategy", "overrides", "noise"}


def command_of(case: Case, command: str = "run") -> str:
    """`co2sim COMMAND` with the options of the case, for a shell.

    Raises OptionError for a cluster or a model that is an object: a command line names files.
    """
    for thing in (case.cluster, case.model):
        if isinstance(thing, Cluster | Model):
            raise OptionError(f"{thing.name} is an object; a command line takes names and files")
    return shlex.join(["co2sim", command, *_options(case)])


def with_tokens(command: str, tokens: float | None, goal: Goal = NO_GOAL) -> str:
    """The command with the tokens to train, and with the user's own step factors."""
    more = (
        []
        if tokens is None
        else ["--tokens", f"{tokens:g}" if float(f"{tokens:g}") == tokens else f"{tokens!r}"]
    )
    for name, factor in goal.factors.items():
        more += ["--steps-factor", f"{name}={factor!r}"]
    return f"{command} {shlex.join(more)}" if more else command


def _options(case: Case) -> Iterator[str]:
    strategy = case.strategy if isinstance(case.strategy, str) else title(case.strategy)
    yield from ("-c", str(case.cluster), "-m", str(case.model), "-s", strategy)
    for field in fields(Case):
        value = getattr(case, field.name)
        if field.name in _NAMED or value == field.default:
            continue
        if field.name in _SWITCHES:
            yield _SWITCHES[field.name]
        else:
            yield from (f"--{field.name.replace('_', '-')}", str(value))
    noise = case.noise
    for name in ("seed", "jitter", "straggle"):
        if getattr(noise, name) != getattr(QUIET, name):
            yield from (f"--{name}", str(getattr(noise, name)))
    for node, speed in noise.node_speed.items():
        yield from ("--node-speed", f"{node}={speed}")
    for path, text in case.overrides.items():
        yield from ("--set", f"{path}={text}")
