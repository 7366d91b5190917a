"""How GPUs divide a model: the combinations of parallelism that a plan tries.

What a user leaves open is tried as published trainings have it: tensor parallelism inside a node
with the sequence divided, stages that layers divide, few chunks, context parallelism for long
sequences, and experts on as many GPUs as divide them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from co2sim.common.errors import OptionError
from co2sim.common.validation import whole
from co2sim.hardware.cluster import Cluster
from co2sim.models.stack import Stack
from co2sim.models.workload import Model
from co2sim.prediction.case import Case
from co2sim.strategies import Strategy

MAX_STAGES = 32
"""Of a pipeline where none are given: published ones have 2 to 35, most of them 4 to 16."""
_MOST_EXPERTS = 64
_MOST_CHUNKS = 8
_MOST = 1024
_COUNTS = ("tp", "cp", "ep", "pp", "interleave")

PIPELINED = {"ddp", "zero1"}
"""Strategies with stages where none are given: others exchange something in every micro-step."""
DIVIDED = {"ddp", "zero1", "zero2", "zero3", "fsdp"}
"""Strategies with other parallelism where none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """One way to divide a model; see the fields of `Case`."""

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    ep: int = 1
    pp: int = 1
    interleave: int = 1

    @property
    def together(self) -> int:
        """GPUs that train on the same samples."""
        return self.tp * self.cp * self.pp

    @classmethod
    def read(cls, case: Case) -> "Mesh":
        """How a case divides its model."""
        return cls(**{field.name: getattr(case, field.name) for field in fields(cls)})

    def __str__(self) -> str:
        """Such as "tp 4 + sp, pp 4 x 5 chunks"; empty for data parallelism alone."""
        sequence = " + sp" * self.sequence_parallel
        chunks = f" x {self.interleave} chunks" if self.interleave > 1 else ""
        parts = {"tp": sequence, "cp": "", "ep": "", "pp": chunks}
        numbers = ((name, getattr(self, name), more) for name, more in parts.items())
        return ", ".join(f"{name} {number}{more}" for name, number, more in numbers if number > 1)

    def of(self, case: Case) -> Case:
        """The case divided so."""
        return replace(case, **{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What is tried of each kind of parallelism; None: what the module says, and 1.

    Raises OptionError for numbers below 1, and for one that is given twice.
    """

    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    interleave: tuple[int, ...] | None = None
    sequence_parallel: bool | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        for name in _COUNTS:
            given = getattr(self, name)
            if given is None:
                continue
            for count in given:
                whole(name, count, 1, _MOST)
            if not given or len(set(given)) < len(given):
                raise OptionError(
                    f"{name} is {', '.join(map(str, given)) or 'empty'}; give each number once"
                )

    @classmethod
    def fixed(cls, case: Case) -> "Axes":
        """What a case says, and nothing else."""
        said: dict[str, Any] = {name: (getattr(case, name),) for name in _COUNTS}
        return cls(**said, sequence_parallel=case.sequence_parallel)

    def within(self, case: Case) -> "Axes":
        """With what a case says in the place of what is open: numbers other than 1."""
        said: dict[str, Any] = {
            name: (getattr(case, name),) for name in _COUNTS if getattr(case, name) > 1
        }
        if case.sequence_parallel:
            said["sequence_parallel"] = True
        return replace(self, **said)

    @property
    def _open(self) -> bool:
        """Whether anything is: what a user says and cannot be is named, and not passed over."""
        return any(getattr(self, name) is None for name in ("tp", "cp", "ep", "pp"))

    def meshes(
        self, strategy: Strategy, cluster: Cluster, model: Model, gpus: int, stack: Stack
    ) -> Iterator[Mesh]:
        """All that fill a number of GPUs, the plain one first."""
        divides, stages = strategy.name in DIVIDED, strategy.name in PIPELINED
        layers = len(model.blocks) - 2
        tps = self.tp or (_powers(min(gpus, cluster.gpus_per_node)) if divides else (1,))
        long = divides and model.unit == "token"
        cps = self.cp or (_powers(model.tokens // stack.context_tokens) if long else (1,))
        eps = self.ep or (_powers(_MOST_EXPERTS) if divides and _mixes(model) else (1,))
        pps = self.pp or (tuple(_stages(layers)) if stages and _lines_up(model) else (1,))
        for pp, tp, cp, ep in product(pps, tps, cps, eps):
            if self._open and (gpus % (tp * cp * pp) or gpus // pp % ep):
                continue
            chunks = self.interleave or _chunks(layers, pp)
            chunks = (1,) if pp == 1 and len(pps) > 1 else chunks
            for count in chunks:
                yield Mesh(
                    tp=tp,
                    sequence_parallel=self.sequence_parallel is not False
                    and (tp > 1 or bool(self.tp and self.sequence_parallel)),
                    cp=cp,
                    ep=ep,
                    pp=pp,
                    interleave=count,
                )


OPEN = Axes()
"""All that is usual."""


def _powers(most: int) -> tuple[int, ...]:
    """Powers of two from 1 on."""
    return tuple(2**k for k in range(max(1, most).bit_length()))


def _mixes(model: Model) -> bool:
    """Whether it has experts."""
    return model.active_parameters < model.parameters


def _lines_up(model: Model) -> bool:
    """Whether stages can have parts of it: its layers have inputs."""
    layers = model.blocks[1:-1]
    return bool(layers) and all(block.boundary_bytes for block in layers)


def _even(layers: int, parts: int) -> bool:
    """Whether parts have as many layers each, maybe with embedding and head as one each."""
    return layers % parts == 0 or (layers + 2) % parts == 0


def _stages(layers: int) -> Iterator[int]:
    """Powers of two, and what divides the layers."""
    for stages in range(1, min(layers, MAX_STAGES) + 1):
        if stages & (stages - 1) == 0 or _even(layers, stages):
            yield stages


def _chunks(layers: int, pp: int) -> tuple[int, ...]:
    """One, and the fewest and the most of a few that divide the layers."""
    if pp == 1:
        return (1,)
    found = [n for n in range(2, _MOST_CHUNKS + 1) if n * pp <= layers and _even(layers, n * pp)]
    return (1, *dict.fromkeys((*found[:1], *found[-1:])))
