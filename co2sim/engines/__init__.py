"""What runs the cases of a study: processes of this machine, Dask, or Ray."""

from co2sim.engines.engine import ENGINES, LOKY, Engine, opened
from co2sim.engines.flow import through
from co2sim.engines.loky_pool import processes
from co2sim.engines.pool import Pool

__all__ = ["ENGINES", "LOKY", "Engine", "Pool", "opened", "processes", "through"]
