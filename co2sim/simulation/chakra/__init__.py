"""Schedules as execution traces of MLCommons Chakra, which ASTRA-sim and others read, and back."""

from co2sim.simulation.chakra.export import Written, write
from co2sim.simulation.chakra.reading import Imported, Replay, read, replay

__all__ = ["Imported", "Replay", "Written", "read", "replay", "write"]
