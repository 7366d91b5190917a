"""Many configurations at once, as tables: any parameter over values, strategies over sizes."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from co2sim.common.convert import Count, Number, Reference, number, shown
from co2sim.common.errors import OptionError
from co2sim.hardware.cluster import Cluster
from co2sim.models.operators import Model
from co2sim.prediction.driver import make_case
from co2sim.prediction.question import JobOptions, Options, Question
from co2sim.prediction.step_factors import NO_GOAL, Goal
from co2sim.prediction.totals import tokens_of
from co2sim.simulation.noise import QUIET, Noise
from co2sim.strategies import Strategy
from co2sim.studies import grid, table
from co2sim.studies.grid import LazyGrid, Shard
from co2sim.studies.pools import Engine, opened
from co2sim.studies.run_all import run_all

if TYPE_CHECKING:
    import pandas as pd

    from co2sim.studies.results_folder import FolderSummary


def sweep(  # noqa: PLR0913 - one keyword per choice
    cluster: Reference | Cluster | None = None,
    model: Reference | Model | None = None,
    strategy: str | Strategy | None = None,
    *,
    vary: grid.Grid,
    sort: str | None = None,
    goal: Goal = NO_GOAL,
    tokens: Number | None = None,
    jobs: Count = 1,
    engine: str = "loky",
    scheduler: str | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> "pd.DataFrame":
    """Simulate all combinations of values: one row a case, in the order of the grid.

    Args:
        cluster: As in `simulate`, unless it varies.
        model: As in `simulate`, unless it varies.
        strategy: As in `simulate`, unless it varies.
        vary: Paths with their values, as in `co2sim sweep --vary`: {"inter.bandwidth":
            ["25 Gbit/s", "100 Gbit/s"], "strategy.tau": [1, 12], "gpus": "8, 64"}.
        sort: A column to sort the rows by, "-column" for falling values.
        goal: A loss to reach; adds the columns `steps_factor`, `steps_to_loss`, `time_to_loss_s`
            and `cost_to_loss`, empty where no factor is known.
        tokens: Tokens that ddp would train, such as 1e12; adds what that takes, as columns with
            the names of `Totals`, empty where a number is missing.
        jobs: Processes, -1: one per core; never more than cases, or than two per core.
        engine: Who runs the cases: "loky" (processes of this machine) or "dask".
        scheduler: The address of Dask's; default: workers are started on this machine, as
            many as `jobs` says. A script that starts Dask's needs `if __name__ == "__main__":`.
        progress: Show a bar on stderr; default: if it is a terminal.
        options: The further keywords of `simulate`.

    Returns:
        The fields of `Result` as columns, with units in their names; memory by item in
        `memory_ITEM_bytes`; every path in `vary PATH`; `efficiency_vs_free_communication`; and
        `error`, which says why a case has no figures: one that fails does not stop the others.

    Raises:
        Co2simError: if an input cannot be read, no worker is there, or no case gives a result.

    >>> found = sweep("a100-tcp80", "gpt2-small", gpus=16, vary={"strategy": "ddp, zero3"})
    >>> list(found["strategy"])
    ['ddp', 'zero3']
    """
    if sort is not None and not isinstance(sort, str):
        raise OptionError(f"sort is {shown(sort)}; it must be the name of a column")
    base = _base(cluster, model, strategy, vary, options)
    settings = grid.settings(vary)
    tokens = _tokens(tokens)
    if sort is not None:
        table.check_column(sort, settings, goal, tokens)
    cases = grid.cases_of(base, settings)
    outcomes = run_all(cases, engine=Engine(engine, scheduler, jobs), progress=progress)
    frame = table.to_frame(cases, outcomes, settings, goal, tokens)
    if sort is None:
        return frame
    return frame.iloc[table.order(frame, sort)].reset_index(drop=True)


def sweep_to(  # noqa: PLR0913 - one keyword per choice
    folder: Reference,
    cluster: Reference | Cluster | None = None,
    model: Reference | Model | None = None,
    strategy: str | Strategy | None = None,
    *,
    vary: grid.Grid,
    shard: str | None = None,
    goal: Goal = NO_GOAL,
    tokens: Number | None = None,
    jobs: Count = 1,
    engine: str = "loky",
    scheduler: str | None = None,
    progress: bool | None = None,
    **options: Unpack[Options],
) -> "FolderSummary":
    """As `sweep`, but to Parquet files in a folder as it runs, for up to 10 million cases.

    What the folder has already is not computed again, unless the case failed, or any of its inputs
    or co2sim itself has changed. The bytes of the files are the same on every machine.
    `pandas.read_parquet(folder)` reads them.

    The folder is of this table alone. `shard` names a part of the cases, such as "3/16": every
    sixteenth, from the third on; when all shards are in one folder, the same call without `shard`
    makes one table of them. All other arguments are those of `sweep`.

    Returns:
        How many cases were computed, found in the folder, and failed.

    Raises:
        Co2simError: if an input cannot be read, no worker is there, or the folder cannot be
            written.
    """
    from co2sim.studies.results_folder import SweepTable, stream  # noqa: PLC0415 - only here

    base = _base(cluster, model, strategy, vary, options)
    part = Shard() if shard is None else Shard.read(shard)
    points = LazyGrid.of(base, vary)
    table = SweepTable(points, Path(folder), part, goal, _tokens(tokens))
    with opened(Engine(engine, scheduler, jobs), len(part.places(len(points)))) as pool:
        return stream(table, pool, progress)


def scale(
    clusters: Reference | Cluster | Iterable[Reference | Cluster],
    model: Reference | Model,
    strategies: str | Strategy | Iterable[str | Strategy],
    *,
    gpus: Any = None,
    goal: Goal = NO_GOAL,
    tokens: Number | None = None,
    jobs: Count = 1,
    progress: bool | None = None,
    **options: Unpack[JobOptions],
) -> "pd.DataFrame":
    """Simulate strategies over GPU counts: one row a case, by cluster, strategy and count.

    There may be one cluster, and one strategy, or several of each. `gpus` are counts, such as
    [8, 16] or "8, 16"; default: one node, doubled up to all. All other arguments are those of
    `sweep`.

    Returns:
        The columns of `sweep`, but for paths.

    Raises:
        Co2simError: if an input cannot be read, a cluster cannot have a count, or no case gives a
            result.

    >>> found = scale("a100-tcp80", "gpt2-small", ["ddp", "co2(tau=12)"], gpus=[8, 16])
    >>> list(found["gpus"])
    [8, 16, 8, 16]
    """
    job = make_case("", model, "", **options)
    tokens = _tokens(tokens)
    cases = grid.over_sizes(job, _several(clusters), _several(strategies), gpus)
    outcomes = run_all(cases, jobs, progress=progress)
    return table.to_frame(cases, outcomes, goal=goal, tokens=tokens)


def _base(cluster: Any, model: Any, strategy: Any, vary: grid.Grid, options: Options) -> Question:
    """What all cases of a sweep have in common; empty where it varies."""
    inputs = {"cluster": cluster, "model": model, "strategy": strategy}
    grid.check(vary)
    _refuse_both(vary, inputs, options)
    filled: dict[str, Any] = {k: "" if value is None else value for k, value in inputs.items()}
    return make_case(**filled, **options)


def _tokens(value: Any) -> float | None:
    """Tokens to train, checked."""
    return None if value is None else tokens_of(number("tokens", value))


def _refuse_both(vary: grid.Grid, needed: Mapping[str, Any], options: Options) -> None:
    """Raise OptionError for what is given, and varied, too: one of them would be dropped.

    What is `needed` has to be either.
    """
    for name, value in needed.items():
        if (value is None) != (name in vary):
            both = f"{name} is given, and varied, too; leave one of them out"
            raise OptionError(f"give {name}, or vary it" if value is None else both)
    chosen = {name for name, value in options.items() if value is not None}
    noise = options.get("noise")
    if isinstance(noise, Noise):
        names = [field.name for field in fields(Noise)]
        chosen |= {name for name in names if getattr(noise, name) != getattr(QUIET, name)}
    for name in vary:
        if name in chosen:
            raise OptionError(f"{name} is given, and varied, too; leave one of them out")


def _several(several: Any) -> list[Any]:
    """One name or object, or several."""
    single = isinstance(several, str | os.PathLike) or not isinstance(several, Iterable)
    return [several] if single else list(several)
