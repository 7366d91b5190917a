"""Training algorithms for anybody's PyTorch loop: the local-update family, and ZeRO++ for FSDP2.

with CO2(model, optimizer, tau=12):
    for batch in loader:
        ...
        optimizer.step()
"""

from realrun.algorithms.co2 import CO2
from realrun.algorithms.diloco import DiLoCo
from realrun.algorithms.local_sgd import LocalSGD
from realrun.algorithms.local_update import LocalUpdate
from realrun.algorithms.overlap_local_sgd import OverlapLocalSGD
from realrun.algorithms.progress import Stats
from realrun.algorithms.slowmo import SlowMo
from realrun.algorithms.workers import Workers
from realrun.algorithms.zeropp import apply_zeropp

__all__ = [
    "CO2",
    "DiLoCo",
    "LocalSGD",
    "LocalUpdate",
    "OverlapLocalSGD",
    "SlowMo",
    "Stats",
    "Workers",
    "apply_zeropp",
]
