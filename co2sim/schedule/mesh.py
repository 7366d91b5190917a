"""How GPUs divide a model: one object that questions, jobs, published runs and results share.

Consecutive GPUs share layers (`tp`), then come those that divide sequences (`cp`); all of these are
in one stage of a pipeline (`pp`), which is a run of consecutive GPUs, and what is left of a stage
is data parallel. Experts are divided among consecutive GPUs of a stage (`ep`), whatever else these
divide.
"""

from dataclasses import dataclass, fields
from itertools import groupby
from typing import Annotated, Any, Self

from co2sim.common.convert import Within, declared, option
from co2sim.common.errors import OptionError
from co2sim.schedule.schedule import Layout

_MOST = 1024
"""Of each way to divide: published trainings have 64 at most."""
_MOST_CHUNKS = 128


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """One way to divide a model; all 1: data parallelism alone.

    Raises OptionError for numbers out of range.
    """

    tp: Annotated[int, Within((1, _MOST))] = option(
        1,
        "GPUs of a node that share every layer (tensor parallelism), and train on the same"
        " samples.",
        "job",
    )
    sequence_parallel: bool = option(
        False,  # noqa: FBT003
        "Let GPUs that share layers divide the sequence between matrix products, too.",
        "job",
    )
    ep: Annotated[int, Within((1, _MOST))] = option(
        1,
        "GPUs that divide the experts of a layer (expert parallelism), and send each other the"
        " tokens for them, as the stack's `experts_all_to_all` says.",
        "job",
    )
    cp: Annotated[int, Within((1, _MOST))] = option(
        1,
        "GPUs that divide every sequence (context parallelism), and count as one for the batch.",
        "job",
    )
    pp: Annotated[int, Within((1, _MOST))] = option(
        1, "Stages of a pipeline (1F1B), each with a part of the layers.", "pipeline"
    )
    interleave: Annotated[int, Within((1, _MOST_CHUNKS))] = option(
        1, "Chunks of layers of each stage of a pipeline.", "pipeline"
    )

    def __post_init__(self) -> None:
        """Convert and check the numbers, of all that a mesh has."""
        for name, value in declared(Mesh, self.mesh_values()).items():
            object.__setattr__(self, name, value)

    def mesh_values(self) -> dict[str, Any]:
        """The fields of a mesh by name, of a record that has more of them."""
        return {name: getattr(self, name) for name in MESH}

    @classmethod
    def of(cls, record: "Mesh") -> Self:
        """The mesh of a record that has more fields."""
        return cls(**record.mesh_values())

    def check(self) -> None:
        """Refuse what divides nothing. Raises OptionError."""
        if self.sequence_parallel and self.tp == 1:
            raise OptionError("sequence_parallel=true needs tp of 2 or more: it divides no more")
        if self.interleave > 1 and self.pp == 1:
            raise OptionError(f"interleave={self.interleave} needs pp of 2 or more")

    @property
    def together(self) -> int:
        """GPUs that train on the same samples."""
        return self.tp * self.cp * self.pp

    @property
    def in_stage(self) -> int:
        """Those of one stage that train on the same samples."""
        return self.tp * self.cp

    @property
    def layer_gpus(self) -> int:
        """GPUs among which the layers of the model are divided: `tp` x `pp`."""
        return self.tp * self.pp

    @property
    def is_plain(self) -> bool:
        """Whether each GPU of a stage has all of its layers, experts and sequences."""
        return self.tp * self.ep * self.cp == 1

    def mesh_words(self) -> str:
        """Such as "tp 4 + sp, pp 4 x 5 chunks"; empty for data parallelism alone."""
        sequence = " + sp" * self.sequence_parallel
        chunks = f" x {self.interleave} chunks" if self.interleave > 1 else ""
        parts = {"tp": sequence, "cp": "", "ep": "", "pp": chunks}
        numbers = ((name, getattr(self, name), more) for name, more in parts.items())
        return ", ".join(f"{name} {size}{more}" for name, size, more in numbers if size > 1)

    def ranks(self, layout: Layout) -> Layout:
        """The layout of a stage in which GPUs that share layers count as one.

        Raises OptionError if these are not of one node.
        """
        g = layout.gpus_per_node
        if g % self.tp == 0:
            return layout.strided(self.tp)
        if self.pp > 1:
            raise OptionError(
                f"tp={self.tp} does not divide the {g} GPUs of a node that one of the pp={self.pp}"
                " stages has"
            )
        raise OptionError(
            f"tp={self.tp} does not divide the {g} GPUs of a node: tensor-parallel GPUs are those"
            " of one node"
        )

    def stage_gpus(self, layout: Layout) -> int:
        """The GPUs of one stage: full nodes, or an equal part of one. Raises OptionError."""
        gpus, g = layout.world_size, layout.gpus_per_node
        each = gpus // self.pp
        if self.pp > 1 and (gpus % self.pp or (each % g and g % each)):
            raise OptionError(
                f"pp={self.pp} does not divide {gpus} GPUs into full nodes of {g}, or into equal"
                " parts of nodes"
            )
        return each

    def layer_counts(self, layers: int) -> list[int]:
        """The layers of each chunk of all stages, in the order in which a sample passes them.

        Chunks that do not divide the layers have unequal parts. Where they divide the layers with
        embedding and head, these count as a layer each, as in the 16 stages of Llama 3.1 405B
        (arXiv 2407.21783, section 3.3.2; --account-for-embedding-in-pipeline-split and
        --account-for-loss-in-pipeline-split of Megatron-LM). Elsewhere the first chunks have one
        more. Raises OptionError where there are fewer layers than chunks.
        """
        parts = self.pp * self.interleave
        each, more = divmod(layers, parts)
        if more and not (layers + 2) % parts:
            middle = (layers + 2) // parts
            return [middle - 1, *[middle] * (parts - 2), middle - 1]
        if not each:
            chunks = f" x interleave={self.interleave}" if self.interleave > 1 else ""
            raise OptionError(
                f"pp={self.pp}{chunks} is more than the {layers} layers: each has one at least"
            )
        return [each + 1] * more + [each] * (parts - more)

    def uneven_split(self, layers: int) -> str | None:
        """How layers are split, as a text; None where all stages have as many."""
        counts = self.layer_counts(layers) if self.pp > 1 else [layers]
        if len(set(counts)) == 1:
            return None
        runs = [(count, len(list(same))) for count, same in groupby(counts)]
        words = ", ".join(
            f"{times} x {count}" if times > 1 else f"{count}" for count, times in runs
        )
        chunks = f" of {self.interleave} chunks, in turn" if self.interleave > 1 else ""
        ends = "; embedding and head count as a layer each" if counts[0] < counts[1] else ""
        return f"the {layers} layers are split unevenly on {self.pp} stages{chunks}: {words}{ends}"


MESH = tuple(field.name for field in fields(Mesh))
"""The names of the fields."""
