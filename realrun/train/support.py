"""What the training can honour of a strategy: the rest is refused with a reason. Needs no torch."""

from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec

from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import WORLD, DType, Layout
from co2sim.strategies import Strategy
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.local import LocalSteps, Replica
from co2sim.strategies.zero import Zero1, Zero2
from co2sim.strategies.zeropp import ZeroPP
from realrun.errors import SITES
from realrun.train.algorithm_registry import LOCAL_UPDATES
from realrun.train.settings import TrainSettings

_FETCHED = {
    "prefetch": "FSDP2 fetches one layer ahead",
    "max_live": "FSDP2 fetches one layer ahead",
    "gathers": "FSDP2 fetches a layer at once",
    "reduce_bucket": "FSDP2 reduces a layer at once",
    "max_reuse": "nothing is recomputed",
}
_REFUSED: dict[str, Mapping[str, str]] = {
    "zero1": {"bucket": "torch's ZeroRedundancyOptimizer has no buckets"},
    "zero2": {
        "bucket": "FSDP2 reduces a layer at a time",
        "owners": "FSDP2 scatters gradients and gathers parameters",
    },
    "zero3": _FETCHED,
    "zeropp": _FETCHED | {"chunks": "a gradient is exchanged at once"},
    "fsdp": {
        "sync": "a step has one micro-step",
        "clip": "--clip-grad bounds the norm, or does not",
        "version": "torch trains with fully_shard",
    },
    **{name: update.refused for name, update in LOCAL_UPDATES.items()},
}
"""Options that torch's own form of a strategy, or ours, does not have, with the reason."""

_SHARDED = ("zero2", "zero3", "zeropp", "fsdp")
"""What leaves a rank with a part of the parameters."""

MIN_STEPS = 3
"""Of a training with three points to estimate at."""


def check(settings: TrainSettings, layout: Layout) -> None:
    """Raise OptionError for what cannot be trained on these ranks."""
    strategy = settings.parsed
    _check_options(strategy)
    if settings.task in {"digits", "segmentation"} and find_spec("sklearn") is None:
        raise OptionError(
            f"task {settings.task} needs scikit-learn, which is not installed: pip install"
            " '.[train]'"
        )
    if isinstance(strategy, ZeroPP) and strategy.hpz_group not in {0, layout.gpus_per_node}:
        raise OptionError(
            f"zeropp: hpz_group={strategy.hpz_group} cannot be trained with: the groups are the"
            f" nodes, of {layout.gpus_per_node} ranks here"
        )
    if isinstance(strategy, FSDP):
        strategy.sharding(layout, WORLD)
    if isinstance(strategy, Zero1 | Zero2):
        strategy.sharing(layout, WORLD)
    if isinstance(strategy, LocalSteps) and strategy.worker == "site" and layout.sites == 1:
        raise OptionError(
            f"{strategy.name}: worker=site needs 2 sites or more, and there is 1: set {SITES} to"
            " their number for every rank, or train in a lab with --sites"
        )
    ranks = layout.world_size
    if settings.batch % ranks:
        raise OptionError(
            f"batch is {settings.batch}; it must be a multiple of the {ranks} ranks, which share it"
        )


def check_estimate(settings: TrainSettings, layout: Layout, *, resume: bool) -> None:
    """Raise OptionError where the constants of the bound cannot be estimated."""
    strategy = settings.parsed
    sharded = strategy.name
    if isinstance(strategy, LocalSteps):
        inside = Replica.of(strategy).ranks(layout) > 1
        sharded = (strategy.inner or "zero2") if inside else ""
    if sharded in _SHARDED:
        raise OptionError(
            f"--estimate needs whole models on every rank, and {sharded} shards them; use ddp"
        )
    if resume:
        raise OptionError("--estimate begins at the start of a training: not with --resume")
    if settings.last < MIN_STEPS:
        raise OptionError(
            f"--estimate needs {MIN_STEPS} steps at least, and there are {settings.last}"
        )


def _check_options(strategy: Strategy) -> None:
    default = type(strategy)()
    for field in fields(default):  # type: ignore[arg-type]
        name, why = field.name, _REFUSED.get(strategy.name, {}).get(field.name)
        if why and getattr(strategy, name) != getattr(default, name):
            raise OptionError(f"{strategy.name}: {name} cannot be trained with: {why}")
    if not isinstance(strategy, LocalSteps):
        return
    if strategy.dtype is DType.FP16:
        raise OptionError("dtype=fp16 cannot be trained with; use fp32, bf16, int8 or int4")
    if strategy.inner == "zero1":
        raise OptionError(
            "inner=zero1 cannot be trained with; use ddp, zero2, zero3, zeropp or fsdp"
        )
