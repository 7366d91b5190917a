"""Simulate how distributed training scales: CO2, ZeRO++, ZeRO, DDP and the local-update family.

`simulate` answers one question, `sweep` and `scale` many. Names are loaded when they are first
used, so that `import co2sim` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from co2sim.common.errors import (
        CatalogError,
        Co2simError,
        OptionError,
        ResourceError,
        ScheduleError,
        UnitError,
    )
    from co2sim.hardware.cluster import GPU, Cluster, KernelTimes, Link
    from co2sim.hardware.failures import Failures
    from co2sim.models.workload import Block, MatMul, Model
    from co2sim.prediction.case import Case
    from co2sim.prediction.driver import run, simulate, trace
    from co2sim.prediction.result import Result
    from co2sim.prediction.step_factors import Goal, ToLoss, to_loss
    from co2sim.prediction.totals import Totals, totals_of
    from co2sim.report.plot import plot
    from co2sim.schedule.schedule import Layout, Schedule
    from co2sim.simulation.noise import Noise
    from co2sim.simulation.trace import Span, Trace
    from co2sim.strategies import Strategy
    from co2sim.strategies.co2 import CO2, PublishedCO2
    from co2sim.strategies.diloco import DiLoCo
    from co2sim.strategies.fsdp import FSDP
    from co2sim.strategies.local_sgd import LocalSGD, OverlapLocalSGD, SlowMo
    from co2sim.strategies.zero import DDP, Zero1, Zero2, Zero3
    from co2sim.strategies.zeropp import ZeroPP
    from co2sim.studies.sweep import scale, sweep, sweep_to

_EXPORTS = {
    "prediction.case": ("Case",),
    "hardware.cluster": ("GPU", "Cluster", "KernelTimes", "Link"),
    "hardware.failures": ("Failures",),
    "common.errors": (
        *("CatalogError", "Co2simError", "OptionError", "ResourceError", "ScheduleError"),
        "UnitError",
    ),
    "studies.sweep": ("scale", "sweep", "sweep_to"),
    "simulation.noise": ("Noise",),
    "report.plot": ("plot",),
    "prediction.result": ("Result",),
    "schedule.schedule": ("Layout", "Schedule"),
    "prediction.step_factors": ("Goal", "ToLoss", "to_loss"),
    "strategies": (
        *("CO2", "DDP", "DiLoCo", "FSDP", "LocalSGD", "OverlapLocalSGD", "PublishedCO2", "SlowMo"),
        *("Strategy", "Zero1", "Zero2", "Zero3", "ZeroPP"),
    ),
    "prediction.driver": ("run", "simulate", "trace"),
    "prediction.totals": ("Totals", "totals_of"),
    "simulation.trace": ("Span", "Trace"),
    "models.workload": ("Block", "MatMul", "Model"),
}
"""The same for who runs it: names by module."""
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "CO2",
    "DDP",
    "FSDP",
    "GPU",
    "Block",
    "Case",
    "CatalogError",
    "Cluster",
    "Co2simError",
    "DiLoCo",
    "Failures",
    "Goal",
    "KernelTimes",
    "Layout",
    "Link",
    "LocalSGD",
    "MatMul",
    "Model",
    "Noise",
    "OptionError",
    "OverlapLocalSGD",
    "PublishedCO2",
    "ResourceError",
    "Result",
    "Schedule",
    "ScheduleError",
    "SlowMo",
    "Span",
    "Strategy",
    "ToLoss",
    "Totals",
    "Trace",
    "UnitError",
    "Zero1",
    "Zero2",
    "Zero3",
    "ZeroPP",
    "plot",
    "run",
    "scale",
    "simulate",
    "sweep",
    "sweep_to",
    "to_loss",
    "totals_of",
    "trace",
]


if not TYPE_CHECKING:  # for whom a name that is not above is an error

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return import_module(f"{__name__}.common.version").own_version()
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
