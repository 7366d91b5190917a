"""How GPUs divide a model: one object that questions, jobs, published runs and results share.

Consecutive GPUs share layers (`tp`), then come those that divide sequences (`cp`); all of these are
in one stage of a pipeline (`pp`), which is a run of consecutive GPUs, and what is left of a stage
is data parallel. Experts are divided among consecutive GPUs of a stage (`ep`), whatever else these
divide; or among groups of consecutive GPUs that share each of them (`etp`).

A stage has one or several parts of the layers, as its schedule says (`schedule.pipeline`).
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby
from typing import Annotated, Any

from co2sim.common.convert import Within, declared, option
from co2sim.common.errors import OptionError
from co2sim.schedule.pipeline import PipelineSchedule, parts_of
from co2sim.schedule.schedule import NODE, SITE, WORLD, Group, Layout, block, replicas_of_experts

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
        "GPUs that share every layer (tensor parallelism), and train on the same samples: of one"
        " node, or full nodes.",
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
    etp: Annotated[int, Within((1, _MOST))] = option(
        1,
        "GPUs that share every expert, with ep of 2 or more: 1 (experts are whole), or as many as"
        " tp. Without ep the GPUs of tp share every expert, and etp is not stated.",
        "job",
    )
    cp: Annotated[int, Within((1, _MOST))] = option(
        1,
        "GPUs that divide every sequence (context parallelism), and count as one for the batch.",
        "job",
    )
    pp: Annotated[int, Within((1, _MOST))] = option(
        1, "Stages of a pipeline, each with a part of the layers.", "pipeline"
    )
    interleave: Annotated[int, Within((1, _MOST_CHUNKS))] = option(
        1, "Chunks of layers of each stage of a pipeline.", "pipeline"
    )
    schedule: PipelineSchedule = option(
        "1f1b",
        "Order of passes in a pipeline: 1f1b; zb_h1 or zbv, with gradients of weights later (zero"
        " bubble; zbv has two chunks a stage, in a V); or dualpipe (micro-batches in both"
        " directions: each GPU has the layers of two stages).",
        "pipeline",
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
        if self.problem:
            raise OptionError(self.problem)

    @property
    def problem(self) -> str:
        """Why it divides nothing; empty where it does."""
        return _problem_of(self)

    @property
    def in_v(self) -> bool:
        """Whether a stage has two chunks of layers, equally far from both ends."""
        return self.schedule in {"zbv", "dualpipe"}

    @property
    def chunks(self) -> int:
        """Of layers, on each stage."""
        return 2 if self.in_v else self.interleave

    def takes(self, micro_steps: int) -> bool:
        """Whether stages can take a number of micro-batches; see `Pipeline`."""
        if self.schedule == "dualpipe":
            return micro_steps >= self.pp
        return self.interleave == 1 or micro_steps % self.pp == 0

    @property
    def parts(self) -> int:
        """Of the layers, of as many each as far as possible: a chunk of a stage has one."""
        return self.pp * (1 if self.schedule == "dualpipe" else self.chunks)

    @property
    def apart(self) -> int:
        """Groups of GPUs that have different layers: `pp`, or half of it, where each has two parts.

        Both stages that have the same layers with dualpipe are data parallel.
        """
        return max(1, self.pp // 2) if self.schedule == "dualpipe" else self.pp

    @property
    def together(self) -> int:
        """GPUs that train on the same samples; with dualpipe half of those that do in turn."""
        return self.tp * self.cp * self.apart

    @property
    def in_stage(self) -> int:
        """Those of one stage that train on the same samples."""
        return self.tp * self.cp

    @property
    def layer_gpus(self) -> int:
        """GPUs among which the layers of the model are divided."""
        return self.tp * self.apart

    @property
    def is_plain(self) -> bool:
        """Whether each GPU of a stage has all of its layers, experts and sequences."""
        return self.tp * self.ep * self.cp == 1

    def mesh_words(self) -> str:
        """Such as "tp 4 + sp, pp 4 x 5 chunks"; empty for data parallelism alone."""
        sequence = " + sp" * self.sequence_parallel
        chunks = f" x {self.interleave} chunks" if self.interleave > 1 else ""
        order = "" if self.schedule == "1f1b" else f" {self.schedule}"
        parts = {"tp": sequence, "cp": "", "ep": "", "etp": "", "pp": chunks + order}
        numbers = ((name, getattr(self, name), more) for name, more in parts.items())
        return ", ".join(f"{name} {size}{more}" for name, size, more in numbers if size > 1)

    @property
    def division(self) -> str:
        """How GPUs divide the model, as a text; empty where each has all of it."""
        along = ", the sequence between products, too" if self.sequence_parallel else ""
        chunks = f" of {self.interleave} chunks each" if self.interleave > 1 else ""
        chunks += "" if self.schedule == "1f1b" else f" ({self.schedule})"
        shared = f", each on {self.etp}" if self.etp > 1 else ""
        parts = {
            f"each layer on {self.tp} GPUs{along}": self.tp,
            f"experts on {self.ep} GPUs{shared}": self.ep,
            f"sequences on {self.cp} GPUs": self.cp,
            f"{self.pp} stages{chunks}": self.pp,
        }
        return "; ".join(words for words, gpus in parts.items() if gpus > 1)

    @property
    def inside(self) -> "Mesh":
        """That of a stage alone."""
        return Mesh(**{n: v for n, v in self.mesh_values().items() if n not in OF_STAGES})

    @property
    def reach(self) -> int:
        """Consecutive GPUs of a stage that exchange something in a pass."""
        return max(self.in_stage, self.expert_gpus)

    @property
    def experts_apart(self) -> bool:
        """Whether GPUs that train on different samples have different experts."""
        return self.ep > 1

    @property
    def experts_whole(self) -> bool:
        """Whether a GPU that has an expert has all of it, while others share layers with it."""
        return self.ep > 1 and self.etp == 1

    @property
    def expert_gpus(self) -> int:
        """Consecutive GPUs that have all experts once, where they are divided."""
        return self.ep * (self.etp if self.ep > 1 else 1)

    @property
    def expert_words(self) -> str:
        """How GPUs divide experts, as options say it."""
        return f"ep={self.ep}" + (f" x etp={self.etp}" if self.etp > 1 else "")

    def expert_replicas(self, ranks: int) -> int:
        """How many of `ranks` data-parallel ranks have the same experts; all where none are apart.

        Raises OptionError where experts do not divide among them, nor they among experts.
        """
        gpus = ranks * self.tp
        if gpus % self.expert_gpus and self.expert_gpus % gpus:
            raise OptionError(
                f"{self.expert_words} does not divide the {gpus} GPUs that share parameters,"
                " gradients or states"
            )
        return max(1, gpus // self.expert_gpus) if self.experts_apart else ranks

    def same_experts(self, group: Group, layout: Layout) -> Group | None:
        """The ranks of `group` with the same experts; None: each is alone, or none are apart.

        Raises OptionError for a group among which experts do not divide.
        """
        ranks = len(group.members(0, layout))
        if not self.experts_apart or self.expert_replicas(ranks) == 1:
            return None
        if group == WORLD:
            return replicas_of_experts(self.expert_gpus)
        if group in {NODE, SITE, block(ranks)}:
            return replicas_of_experts(self.expert_gpus, ranks * self.tp)
        raise OptionError(
            f"{self.expert_words} does not combine with parameters shared over {group}"
        )

    def expert_peers(self, among: Group, peers: Group | None, layout: Layout) -> Group | None:
        """The ranks with the same share of the same experts, where `peers` have it of all else.

        Ranks of `among` divide what is shared. Where these are too few for all experts, no other of
        them has the same. None: no other rank has.
        """
        ranks = len(among.members(0, layout))
        if peers is None or not self.experts_apart or ranks * self.tp % self.expert_gpus == 0:
            return peers
        alone = self.expert_replicas(layout.world_size) == 1
        return None if alone else replicas_of_experts(self.expert_gpus)

    def replicas_in(self, layout: Layout) -> int:
        """Groups of GPUs of a stage that train on the same samples. Raises OptionError for none."""
        ranks = self.ranks(layout).world_size
        if ranks % self.cp:
            raise OptionError(f"cp={self.cp} does not divide {ranks} data-parallel GPUs")
        return ranks // self.cp

    def ranks(self, layout: Layout) -> Layout:
        """The layout of a stage in which GPUs that share layers count as one.

        Raises OptionError if these are no equal parts of a node, nor full nodes of a site.
        """
        g, site = layout.gpus_per_node, layout.ranks_per_site
        if layout.world_size % self.expert_gpus:
            raise OptionError(f"{self.expert_words} does not divide {layout.world_size} GPUs")
        if g % self.tp == 0 or (self.tp % g == 0 and site % self.tp == 0):
            return layout.strided(self.tp)
        who = f"one of the pp={self.pp} stages" if self.pp > 1 else "a site"
        where = f"{site} GPUs that {who} has" if self.pp > 1 or layout.sites > 1 else f"{site} GPUs"
        raise OptionError(
            f"tp={self.tp} divides neither the {g} GPUs of a node, nor the {where} into full nodes"
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
        if self.schedule == "dualpipe" and each % self.in_stage:
            raise OptionError(
                f"tp={self.tp} x cp={self.cp} does not divide the {each} GPUs of a stage of"
                f" pp={self.pp} on {gpus} GPUs"
            )
        return gpus // self.apart

    def parts_of(self, stage: int) -> tuple[int, ...]:
        """The parts of the layers that a stage has, as a sample passes them."""
        parts = parts_of(self.pp, self.chunks, stage, in_v=self.in_v)
        return tuple(sorted(part % self.parts for part in parts))

    def layer_counts(self, layers: int) -> list[int]:
        """The layers of each part, as a sample passes them; see `_split`.

        Raises OptionError where there are fewer layers than parts.
        """
        counts = _split(layers, self.parts, self.pp if self.schedule == "zbv" else self.parts)
        if counts is None:
            chunks = f" x interleave={self.interleave}" if self.interleave > 1 else ""
            chunks += " x 2 chunks of schedule=zbv" if self.schedule == "zbv" else ""
            raise OptionError(
                f"pp={self.pp}{chunks} is more than the {layers} layers: each has one at least"
            )
        return counts

    def uneven_split(self, layers: int) -> str | None:
        """How layers are split, as a text; None where all stages have as many."""
        counts = self.layer_counts(layers) if self.pp > 1 else [layers]
        if len(set(counts)) == 1:
            return None
        chunks = f" of {self.interleave} chunks, in turn" if self.interleave > 1 else ""
        chunks += " of 2 chunks, in a V" if self.schedule == "zbv" else ""
        runs = [(count, len(list(same))) for count, same in groupby(counts)]
        words = ", ".join(f"{times} x {n}" if times > 1 else f"{n}" for n, times in runs)
        ends = "; embedding and head count as a layer each" if counts[0] < counts[1] else ""
        return f"the {layers} layers are split unevenly on {self.pp} stages{chunks}: {words}{ends}"


def _problem_of(mesh: Mesh) -> str:
    order = "" if mesh.schedule == "1f1b" else f"schedule={mesh.schedule}"
    if mesh.sequence_parallel and mesh.tp == 1:
        return "sequence_parallel=true needs tp of 2 or more: it divides no more"
    if mesh.etp not in {1, mesh.tp if mesh.ep > 1 else 1}:
        alone = f"needs ep of 2 or more: without it all tp={mesh.tp} GPUs share every expert"
        must = f"shares no experts: it must be 1 or tp={mesh.tp}"
        return f"etp={mesh.etp} {must if mesh.ep > 1 else alone}"
    if mesh.pp == 1 and (order or mesh.interleave > 1):
        return f"{order or f'interleave={mesh.interleave}'} needs pp of 2 or more"
    if mesh.in_v and mesh.interleave > 1:
        return f"{order} does not combine with interleave={mesh.interleave}: it has two chunks"
    if mesh.schedule == "dualpipe" and mesh.pp % 2:
        return f"{order} needs an even pp, and pp is {mesh.pp}"
    return ""


def _split(layers: int, parts: int, unit: int) -> list[int] | None:
    """The layers of each part; None where these are more.

    Parts that do not divide the layers have unequal numbers. Where they divide the layers with
    embedding and head, these count as a layer each, as in the 16 stages of Llama 3.1 405B (arXiv
    2407.21783, section 3.3.2; --account-for-embedding-in-pipeline-split and
    --account-for-loss-in-pipeline-split of Megatron-LM). They do so where `unit` divides all, too:
    with as many stages of two chunks in a V each has as many, if the first parts have one more
    (torchtitan b5bcd76c6, torchtitan/distributed/pipeline_parallel.py,
    _generate_llm_fqn_per_model_part). Elsewhere the first parts have one more.
    """
    each, more = divmod(layers, parts)
    whole, counts = layers + 2, [each + 1] * more + [each] * (parts - more)
    if more and whole >= parts and not whole % unit:
        each, more = divmod(whole, parts)
        counts = [each + 1] * more + [each] * (parts - more)
        return [counts[0] - 1, *counts[1:-1], counts[-1] - 1]
    return counts if each else None


OF_STAGES = ("pp", "interleave", "schedule")
"""Those fields that say which layers a stage has."""

MESH = tuple(field.name for field in fields(Mesh))
"""The names of the fields."""


@lru_cache(maxsize=256, typed=True)
def _are_converted(stated: tuple[Any, ...]) -> bool:
    """Whether these are what a mesh holds already; a job is changed more often than its mesh."""
    return all(type(value) in {int, bool, str} for value in stated) and list(stated) == list(
        declared(Mesh, dict(zip(MESH, stated, strict=True))).values()
    )
