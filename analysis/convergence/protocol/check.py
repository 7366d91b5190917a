"""A claim of the protocol, and whether it holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold, and what was measured."""

    claim: str
    passed: bool
    measured: str
