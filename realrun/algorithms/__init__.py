"""Training algorithms for any PyTorch loop: the local-update family, and ZeRO++ for FSDP2.

with CO2(model, optimizer, tau=12):
    for batch in loader:
        ...
        optimizer.step()

Everything that a training loop needs can be imported from here, the errors included: all of them
are Co2simErrors.
"""

from typing import TYPE_CHECKING, Any

from co2sim.errors import Co2simError, OptionError
from realrun.algorithms.co2 import CO2
from realrun.algorithms.counters import Stats
from realrun.algorithms.diloco import DiLoCo
from realrun.algorithms.local_sgd import LocalSGD
from realrun.algorithms.local_update import LocalUpdate
from realrun.algorithms.options import Wire
from realrun.algorithms.overlap_local_sgd import OverlapLocalSGD
from realrun.algorithms.quantize_format import Rounding
from realrun.algorithms.slowmo import SlowMo
from realrun.algorithms.workers import Worker, Workers
from realrun.checks import Gap
from realrun.errors import MismatchError, NonFiniteError, RankFailure

if TYPE_CHECKING:
    from realrun.algorithms.zeropp import Places, Sent, ZeroPP, apply_zeropp

__all__ = [
    "CO2",
    "Co2simError",
    "DiLoCo",
    "Gap",
    "LocalSGD",
    "LocalUpdate",
    "MismatchError",
    "NonFiniteError",
    "OptionError",
    "OverlapLocalSGD",
    "Places",
    "RankFailure",
    "Rounding",
    "Sent",
    "SlowMo",
    "Stats",
    "Wire",
    "Worker",
    "Workers",
    "ZeroPP",
    "apply_zeropp",
]

_OF_ZEROPP = ("Places", "Sent", "ZeroPP", "apply_zeropp")


def __getattr__(name: str) -> Any:
    """What needs FSDP2, whose import takes a second, once it is asked for."""
    if name not in _OF_ZEROPP:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from realrun.algorithms import zeropp  # noqa: PLC0415 - see above

    return getattr(zeropp, name)


def __dir__() -> list[str]:
    """All that can be imported from here."""
    return sorted({*globals(), *__all__})
