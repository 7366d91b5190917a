"""Simulate how distributed training scales: CO2, ZeRO++, ZeRO, DDP and the local-update family."""

from co2sim.case import Case
from co2sim.errors import Co2simError
from co2sim.result import Result
from co2sim.study import run, simulate

__all__ = ["Case", "Co2simError", "Result", "run", "simulate"]
__version__ = "0.1.0"
