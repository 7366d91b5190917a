# The names of co2sim: for type checkers, and for __init__.py, which loads each when it is used.

from .common.errors import (
    CatalogError as CatalogError,
    Co2simError as Co2simError,
    OptionError as OptionError,
    ResourceError as ResourceError,
    ScheduleError as ScheduleError,
    UnitError as UnitError,
)
from .catalog.own_models import from_torch as from_torch
from .hardware.cluster import (
    GPU as GPU,
    Cluster as Cluster,
    KernelTimes as KernelTimes,
    Link as Link,
)
from .hardware.fabric import Fabric as Fabric, Tier as Tier
from .hardware.failures import Failures as Failures
from .models.operators import Block as Block, Model as Model, Product as Product
from .prediction.question import Question as Question
from .prediction.driver import run as run, simulate as simulate, trace as trace
from .prediction.result import Result as Result
from .prediction.step_factors import (
    Goal as Goal,
    Project as Project,
    ToLoss as ToLoss,
    to_loss as to_loss,
)
from .prediction.totals import Totals as Totals, totals_of as totals_of
from .report.plot import plot as plot
from .schedule.schedule import Layout as Layout, Schedule as Schedule
from .simulation.noise import Noise as Noise
from .simulation.trace import Span as Span, Trace as Trace
from .strategies import Strategy as Strategy
from .strategies.co2 import CO2 as CO2, PublishedCO2 as PublishedCO2
from .strategies.diloco import DiLoCo as DiLoCo
from .strategies.fsdp import FSDP as FSDP
from .strategies.local_sgd import (
    LocalSGD as LocalSGD,
    OverlapLocalSGD as OverlapLocalSGD,
    SlowMo as SlowMo,
)
from .strategies.zero import DDP as DDP, Zero1 as Zero1, Zero2 as Zero2, Zero3 as Zero3
from .strategies.zeropp import ZeroPP as ZeroPP
from .trainers.reading import Reading as Reading, read_trainer as read_trainer
from .studies.beside import beside as beside
from .studies.sweep import scale as scale, sweep as sweep, sweep_to as sweep_to

__version__: str
