"""How GPUs divide a model: one object that questions, jobs, published runs and results share.

Consecutive GPUs share layers (`tp`), then come those that divide sequences (`cp`); all of these are
in one stage of a pipeline (`pp`), which is a run of consecutive GPUs, and what is left of a stage
is data parallel. Experts are divided among consecutive GPUs of a stage (`ep`), whatever else these
divide.

`Pipeline` is the order of passes in stages (1F1B), and `ends` says when each stage has ended its
own. A stage with several chunks has every `pp`-th of all chunks (Narayanan et al. 2021, arXiv
2104.04473, section 2.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any

from co2sim.common.convert import Within, declared, option
from co2sim.common.errors import OptionError
from co2sim.common.units import Seconds
from co2sim.schedule.schedule import NODE, WORLD, Group, Layout, block, replicas_of_experts

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
        stated = tuple(self.mesh_values().values())
        if not _are_converted(stated):
            for name, value in declared(Mesh, self.mesh_values()).items():
                object.__setattr__(self, name, value)

    def mesh_values(self) -> dict[str, Any]:
        """The fields of a mesh by name, of a record that has more of them."""
        return {name: getattr(self, name) for name in MESH}

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

    @property
    def division(self) -> str:
        """How GPUs divide the model, as a text; empty where each has all of it."""
        along = ", the sequence between products, too" if self.sequence_parallel else ""
        chunks = f" of {self.interleave} chunks each" if self.interleave > 1 else ""
        parts = {
            f"each layer on {self.tp} GPUs{along}": self.tp,
            f"experts on {self.ep} GPUs": self.ep,
            f"sequences on {self.cp} GPUs": self.cp,
            f"{self.pp} stages{chunks}": self.pp,
        }
        return "; ".join(words for words, gpus in parts.items() if gpus > 1)

    @property
    def inside(self) -> "Mesh":
        """That of a stage alone."""
        return Mesh(tp=self.tp, sequence_parallel=self.sequence_parallel, ep=self.ep, cp=self.cp)

    @property
    def reach(self) -> int:
        """Consecutive GPUs of a stage that exchange something in a pass."""
        return max(self.in_stage, self.ep)

    @property
    def experts_apart(self) -> bool:
        """Whether GPUs that train on different samples have different experts."""
        return self.ep > 1

    @property
    def expert_words(self) -> str:
        """How GPUs divide experts, as options say it."""
        return f"ep={self.ep}"

    def expert_replicas(self, ranks: int) -> int:
        """How many of `ranks` data-parallel ranks have the same experts; all where none are apart.

        Raises OptionError where experts do not divide among them.
        """
        gpus = ranks * self.tp
        if gpus % self.ep:
            raise OptionError(
                f"{self.expert_words} does not divide the {gpus} GPUs that share parameters,"
                " gradients or states"
            )
        return gpus // self.ep if self.experts_apart else ranks

    def same_experts(self, group: Group, layout: Layout) -> Group | None:
        """The ranks of `group` with the same experts; None: each is alone, or none are apart.

        Raises OptionError for a group among which experts do not divide.
        """
        ranks = len(group.members(0, layout))
        if not self.experts_apart or self.expert_replicas(ranks) == 1:
            return None
        if group == WORLD:
            return replicas_of_experts(self.ep)
        if group in {NODE, block(ranks)}:
            return replicas_of_experts(self.ep, ranks * self.tp)
        raise OptionError(
            f"{self.expert_words} does not combine with parameters shared over {group}"
        )

    def replicas_in(self, layout: Layout) -> int:
        """Groups of GPUs of a stage that train on the same samples. Raises OptionError for none."""
        ranks = self.ranks(layout).world_size
        if ranks % self.cp:
            raise OptionError(f"cp={self.cp} does not divide {ranks} data-parallel GPUs")
        return ranks // self.cp

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


@lru_cache(maxsize=256, typed=True)
def _are_converted(stated: tuple[Any, ...]) -> bool:
    """Whether these are what a mesh holds already; a job is changed more often than its mesh."""
    return all(type(value) in {int, bool} for value in stated) and list(stated) == list(
        declared(Mesh, dict(zip(MESH, stated, strict=True))).values()
    )


_NOT_YET: Seconds = -1.0
MAX_PASSES = 2_000_000
"""Of all stages in a step: seconds of computing."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` with `chunks` of layers each, and the micro-batches of a step.

    Raises OptionError for what the order does not allow, and for too many passes.
    """

    stages: int
    chunks: int
    micros: int

    def __post_init__(self) -> None:
        """Refuse micro-batches that interleaved stages cannot take in turn."""
        passes = 2 * self.stages * self.chunks * self.micros
        if passes > MAX_PASSES:
            raise OptionError(
                f"pp={self.stages}, interleave={self.chunks} and {self.micros:,} micro-steps are"
                f" {passes:,} passes in a step; at most {MAX_PASSES:,} are simulated"
            )
        if self.chunks > 1 and self.micros % self.stages:
            raise OptionError(
                f"interleave={self.chunks} needs micro-steps in multiples of pp={self.stages}, and"
                f" a step has {self.micros}; give accumulation or global_batch"
            )

    def warm_up(self, stage: int) -> int:
        """Forward passes before the first backward pass of a stage."""
        later = self.stages - 1 - stage
        if self.chunks > 1:
            later = 2 * later + (self.chunks - 1) * self.stages
        return min(later, self.chunks * self.micros)

    def microbatches_in_flight(self, stage: int, counts: Sequence[int]) -> float:
        """The most whose activations a stage holds; its chunks have `counts` layers."""
        if len(set(counts)) == 1:
            return min(self.warm_up(stage) + 1, self.chunks * self.micros) / self.chunks
        most = now = 0
        for pass_index in self.order(stage):
            backward, part = divmod(pass_index // self.micros, self.stages * self.chunks)
            now += counts[part // self.stages] * (1 - 2 * backward)
            most = max(most, now)
        return most / sum(counts)

    def order(self, stage: int) -> list[int]:
        """The numbers of the passes of a stage in turn.

        Parts of the layers are numbered in turn, all first chunks first: `part` is that of a chunk
        of a stage. A forward pass has the number part x micros + micro-batch, and a backward pass
        as many more as there are forward passes.
        """
        forward, backward = (self._of(stage, way) for way in (False, True))
        before = self.warm_up(stage)
        order = forward[:before]
        for pair in zip(forward[before:], backward, strict=False):
            order += pair
        return order + backward[len(forward) - before :]

    def _of(self, stage: int, backward: bool) -> list[int]:  # noqa: FBT001
        """All passes in one direction: as many micro-batches as stages on each chunk in turn."""
        group = min(self.stages, self.micros) if self.chunks > 1 else self.micros
        parts = range(stage, self.stages * self.chunks, self.stages)
        before = len(parts) * self.stages * self.micros if backward else 0
        return [
            before + part * self.micros + micro
            for first in range(0, self.micros, group)
            for part in (reversed(parts) if backward else parts)
            for micro in range(first, first + group)
        ]


def ends(
    pipeline: Pipeline,
    forward: Sequence[Sequence[Seconds]],
    backward: Sequence[Sequence[Seconds]],
    between: Seconds,
) -> list[Seconds]:
    """When each stage ends its last pass; passes take `forward[stage][chunk]`, and `backward`.

    `between` passes from the end of a pass until another stage has what it made.
    """
    stages, micros = pipeline.stages, pipeline.micros
    parts = stages * pipeline.chunks
    took = [way[n % stages][n // stages] for way in (forward, backward) for n in range(parts)]
    # a pass waits for that of the part before or behind, the first backward pass for the forward
    away = [0, *[-micros] * (parts - 1), *[micros] * (parts - 1), -parts * micros]
    sent = [between if stages > 1 and abs(n) == micros else 0.0 for n in away[:-1]] + [0.0]
    ended = [_NOT_YET] * (2 * parts * micros)
    orders = [pipeline.order(stage) for stage in range(stages)]
    done, free = [0] * stages, [0.0] * stages
    there_and_back = [*range(stages), *range(stages - 2, 0, -1)]
    while any(turn < len(order) for turn, order in zip(done, orders, strict=True)):
        for stage in there_and_back:
            order, turn, now = orders[stage], done[stage], free[stage]
            while turn < len(order):
                pass_index = order[turn]
                part = pass_index // micros
                if away[part]:
                    come = ended[pass_index + away[part]]
                    if come < 0:
                        break
                    now = max(now, come + sent[part])
                now = ended[pass_index] = now + took[part]
                turn += 1
            done[stage], free[stage] = turn, now
    return free
