"""Training algorithms for any PyTorch loop: the local-update family, and ZeRO++ for FSDP2.

with CO2(model, optimizer):
    for batch in loader:
        ...
        optimizer.step()

Everything that a training loop needs can be imported from here, the errors included: all of them
are Co2simErrors.
"""

from co2sim.common.delayed_averaging import LateAverage
from co2sim.common.errors import Co2simError, OptionError
from realrun.algorithms.averaging import Transport
from realrun.algorithms.co2 import CO2, Clipping
from realrun.algorithms.local_sgd import DiLoCo, LocalSGD, OverlapLocalSGD, SlowMo
from realrun.algorithms.local_update import LocalUpdate
from realrun.algorithms.outer_loop import Stats
from realrun.algorithms.process_groups import Wire, Worker, Workers
from realrun.algorithms.quantization_format import Rounding
from realrun.algorithms.zeropp import Places, Sent, ZeroPP, apply_zeropp
from realrun.errors import Gap, MismatchError, NonFiniteError, RankFailure

__all__ = [
    "CO2",
    "Clipping",
    "Co2simError",
    "DiLoCo",
    "Gap",
    "LateAverage",
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
    "Transport",
    "Wire",
    "Worker",
    "Workers",
    "ZeroPP",
    "apply_zeropp",
]
