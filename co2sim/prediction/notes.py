"""Notes on a result: warnings, what was assumed, options without effect, what is not counted."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from co2sim.catalog import Contents, Fact, load_cluster, names
from co2sim.common.units import Bytes, counted, scaled
from co2sim.hardware.cluster import GPU, LEAST_CAP, Cluster
from co2sim.models.operators import Attention, Block
from co2sim.prediction.intervals import KIND_WORDS, error_model
from co2sim.prediction.job import Job, stage_of
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.strategies import LocalSteps, Strategy, with_options
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.local import Replica
from co2sim.strategies.zero import Zero3
from co2sim.strategies.zeropp import ZeroPP
from co2sim.training.memory import host_memory, moved_to_host, sent_to_host
from co2sim.training.workload import Workload

_MIN_GAIN = 1e-3
"""Of the speed: what a warning must be worth."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What keeps blocks from being gathered ahead, as a text, and a strategy without it."""

    words: str
    better: Strategy
    options: str

    def warning(self, result: Result, gain: float) -> tuple[str, ...]:
        """A line on it, if the better strategy is faster by a factor `gain`."""
        if gain < 1 + _MIN_GAIN:
            return ()
        speed, instead = (f"{result.tokens_per_s * times:,.0f}" for times in (1, gain))
        line = f"{self.options} gives {instead} {result.unit}s/s instead of {speed}: {self.words}"
        return (line,)


def budget_limit(job: Job) -> Limit | None:
    """The budget that is less than some blocks need, then gathered late; None if no such."""
    strategy = job.strategy
    if isinstance(strategy, Zero3 | ZeroPP):
        return None if job.layout.world_size == 1 else _of_options(strategy, _parts(job))
    if not isinstance(strategy, LocalSteps) or strategy.inner != "zero3":
        return None
    budget, parts = Zero3().prefetch, _parts(job)
    if Replica.of(strategy).ranks(job.layout) == 1 or _largest(parts).parameters <= budget:
        return None
    words = _prefetch_words(f"inner=zero3 has prefetch={budget}", budget, parts)
    return Limit(words, with_options(strategy, {"inner": "fsdp"}), "inner=fsdp")


def _parts(job: Job) -> list[Sequence[Block]]:
    """The blocks of each stage."""
    work = job.workload
    return [stage_of(work, stage).share.model.blocks for stage in range(work.pp)]


def _of_options(strategy: Zero3 | ZeroPP, parts: Sequence[Sequence[Block]]) -> Limit | None:
    """The smaller of its two budgets: for what is ahead, and for all that is present."""
    largest = _largest(parts).parameters
    pairs = [pair for blocks in parts for pair in pairwise(blocks)]
    most = max(map(_together, pairs), default=largest)
    options = {"prefetch": largest} if largest > strategy.prefetch else {}
    options |= {"max_live": most} if most > strategy.max_live else {}
    if not options:
        return None
    if "prefetch" in options:
        words = _prefetch_words(f"prefetch={strategy.prefetch}", strategy.prefetch, parts)
    else:
        words = _live_words(strategy.max_live, pairs)
    better = with_options(strategy, {name: str(value) for name, value in options.items()})
    return Limit(words, better, ",".join(f"{name}={value}" for name, value in options.items()))


def _prefetch_words(words: str, budget: int, parts: Sequence[Sequence[Block]]) -> str:
    sizes = [block.parameters for blocks in parts for block in blocks]
    largest = _largest(parts)
    return (
        f"{words} is less than {sum(size > budget for size in sizes)} of"
        f" {counted(len(sizes), 'block')} need ({largest.name} has"
        f" {counted(largest.parameters, 'parameter')})"
    )


def _live_words(limit: int, pairs: Sequence[tuple[Block, Block]]) -> str:
    first, second = max(pairs, key=_together)
    over = sum(_together(pair) > limit for pair in pairs)
    return (
        f"max_live={limit} is less than {over} of {counted(len(pairs), 'block')} need"
        f" beside the one before ({first.name} and {second.name} have"
        f" {counted(_together((first, second)), 'parameter')})"
    )


def _largest(parts: Sequence[Sequence[Block]]) -> Block:
    return max((block for blocks in parts for block in blocks), key=lambda block: block.parameters)


def _together(pair: tuple[Block, Block]) -> int:
    return pair[0].parameters + pair[1].parameters


_NEGLIGIBLE = 0.01
"""A probe measures passes of other shapes than a model's: sizes so near each other are the same."""


def offloaded(job: Job) -> tuple[str, ...]:
    """What the host of a node has to hold."""
    if job.workload.offload == "none":
        return ()
    stage, gpus = job.stage(0, 1), job.cluster.gpus_per_node
    if job.workload.offload == "activations":
        each = sum(sent_to_host(stage.workload.share).values())
        return (f"activations take {_on_a_node(each, gpus)}; the interval is that of runs without",)
    what = "optimizer states and gradients"
    each = host_memory(stage.workload, stage.schedule)
    if job.workload.offload == "parameters":
        whole = replace(stage, workload=replace(stage.workload, offload="none"))
        what = "parameters, optimizer states and gradients"
        each = moved_to_host(whole.timeline(), stage.timeline())
    interval = "the interval is that of runs without a host's optimizer"
    return (f"{what} take {_on_a_node(each, gpus)}; {interval}",)


def _on_a_node(each: Bytes, gpus: int) -> str:
    """Of the memory of hosts: for each GPU, and of a node."""
    whole = scaled(gpus * each, "B")
    return f"{scaled(each, 'B')} of the host's memory for each GPU, {whole} on a node"


def beyond_the_table(gpu: GPU, job: Workload) -> list[Fact]:
    """Passes outside of the table of efficiencies, and flash attention without a known speed."""
    facts = _unknown_attention(gpu, job)
    if not gpu.efficiency:
        return facts
    works = job.works()
    sizes = [pass_.flops for w in works for pass_ in (w.forward, w.backward) if pass_.flops]
    (least, at_least), (most, at_most) = gpu.efficiency[0], gpu.efficiency[-1]
    for size, bound, value, word in (
        (min(sizes, default=least), least, at_least, "smallest"),
        (max(sizes, default=most), most, at_most, "largest"),
    ):
        if (size / bound - 1) * (1 if word == "largest" else -1) > _NEGLIGIBLE:
            why = (
                f"a pass of the job has {scaled(size, 'FLOP')}; the {word} pass whose efficiency"
                f" is known has {scaled(bound, 'FLOP')}, and its efficiency is taken"
            )
            facts.append(Fact("cluster.gpu.efficiency", str(value), why, assumed=True))
    return facts


def _has_scores(blocks: Sequence[Block]) -> bool:
    return any(op.softmax for block in blocks for op in block.of(Attention))


def _unknown_attention(gpu: GPU, job: Workload) -> list[Fact]:
    """Flash attention where the speed of its kernels is not known."""
    if not gpu.kernels or gpu.kernels.attention_efficiency is not None:
        return []
    if job.attention != "flash" or not _has_scores(job.model.blocks):
        return []
    why = "no speed of flash attention is known for these kernels: that of other products is taken"
    value = str(gpu.kernels.gemm_efficiency)
    return [Fact("cluster.gpu.kernels.attention_efficiency", value, why, assumed=True)]


_FEW = 128
"""GPUs. Published runs of one kind show what more of them cost, and begin here."""

IDLE_RECOMPUTE = "recompute=selective repeats nothing: flash attention keeps no scores"
_NO_KERNELS = "changes memory, but not time: nothing is known of the kernels of the GPU"
FEW_STATISTICS = (
    "recompute=attention saves 4 bytes for a token and head, and no more: flash attention keeps no"
    " scores"
)
IDLE_CHECKPOINTING = (
    "checkpointing=reentrant changes nothing unless recompute makes whole layers or an mlp again"
)
EAGER_ATTENTION = f"attention=eager {_NO_KERNELS}"
EAGER_LOSS = f"loss=eager {_NO_KERNELS}"
SCALE = (
    f"on more than {_FEW} GPUs, where interference, node_spread and step_spread are 0, what more"
    " GPUs cost beyond exposed communication is not counted: published FSDP runs on 512 H100 lost 4"
    " to 8 % against 128; a probe measures interference, the stack composer-2023 has it fitted"
)
IDLE_STACK = (
    "--stack changes nothing here: the file of the GPU states its kernels itself, or nothing is"
    " known of them"
)
ADAPTERS = (
    "lora: none of the published runs that intervals are made of has adapters, so that how far off"
    " this is is not known"
)
FASTEST = (
    "micro-batch and recomputation: the fastest that leave 10 % of the memory of a GPU free, or"
    " those that need the least memory where none does"
)
OFF = "off in the mean"
"""What notes on how far off predictions of a kind were have, and no others."""
PIPELINED = (
    "pipeline: PyTorch's own, as in torchtitan, keeps gathered units and whole gradients of FSDP2"
    " to the end of a step, which takes more memory: -s fsdp:reshard_after_forward=false,sync=last"
)
"""Source: torch 2.13, torch/distributed/pipelining/stage.py, backward_maybe_with_nosync; torchtitan
b5bcd76c6, torchtitan/distributed/fsdp.py: the default is not pp_enabled."""
BATCH_OF = "global batch: "
"""How the note begins that says where it comes from."""
ONE_SITE = "one site alone"
"""How the note begins that compares several sites with one."""
WHAT_IF = "what-if: "
"""How the notes begin that say what the stack has not."""
_ALIKE = (
    *(IDLE_RECOMPUTE, FEW_STATISTICS, IDLE_CHECKPOINTING, FASTEST),
    *(EAGER_ATTENTION, EAGER_LOSS, SCALE, IDLE_STACK, PIPELINED),
)


_CLEARLY = 1.05
"""From this on two digits say more than that they are alike."""


def host_limits(load: float | None) -> tuple[str, ...]:
    """A remark where the host needs longer than the GPU: `load` times as long."""
    if load is None or load <= 1:
        return ()
    times = f"{load:.2g} times " if load >= _CLEARLY else ""
    text = f"the host needs {times}as long as the GPU for the passes"
    return (f"{text}: larger micro-batches help, faster kernels do not",)


def rate_of_a_gpu(question: Question, cluster: Cluster) -> tuple[str, ...]:
    """A warning where the rate that a user gives between nodes is that of one GPU in its class.

    The class of a rate that replaces another one is that of the cluster, and that of a user's file
    is what most clusters of the catalog with its GPU have.
    """
    rates = []
    if "inter.bandwidth" in question.overrides and not isinstance(question.cluster, Cluster):
        rates.append(load_cluster(question.cluster, {}).value.inter.bandwidth)
    if isinstance(question.cluster, Contents):
        rates += _usual_rate(cluster.gpu.name, cluster.gpus_per_node)
    usual, rate = cluster.gpus_per_node * cluster.inter.bandwidth, cluster.inter.bandwidth
    if cluster.gpus_per_node == 1 or not any(math.isclose(one, usual) for one in rates):
        return ()
    node, gpu, all_ = (
        scaled(8 * one, "bit/s") for one in (rate, rate / cluster.gpus_per_node, usual)
    )
    words = f"inter.bandwidth is a node's, and {node} of it are {gpu} a GPU"
    return (f"{words}: clusters of this class have {all_} a node",)


def low_cap(cluster: Cluster) -> tuple[str, ...]:
    """A warning where a power cap is lower than the law of its speed was measured."""
    gpu = cluster.gpu
    if not gpu.is_capped_low or gpu.power_cap is None or gpu.tdp is None:
        return ()
    cap = f"gpu.power_cap is {gpu.power_cap / gpu.tdp:.0%} of {scaled(gpu.tdp, 'W')}"
    law = f"speed by power was measured down to {LEAST_CAP:.0%} only"
    return (f"{cap}: {law}, and trainings on a V100 at 40% were 8 to 20% slower than it says",)


@cache
def _usual_rate(gpu: str, gpus_per_node: int) -> list[float]:
    """What most clusters of the catalog with such nodes have between them, if there is any."""
    every = (load_cluster(name).value for name in names("clusters"))
    alike = Counter(
        cluster.inter.bandwidth
        for cluster in every
        if (cluster.gpu.name, cluster.gpus_per_node) == (gpu, gpus_per_node)
    )
    return [rate for rate, _ in alike.most_common(1)]


def remarks(job: Job, gpus: int, asked: Collection[str] = ()) -> tuple[str, ...]:
    """Those on a job; `asked` are the options of a stack that a user gave himself."""
    cluster, work, noise = job.stage_cluster, job.workload, job.options.noise
    blocks = work.share.model.blocks
    plain = cluster.gpu.kernels is None
    scores = _has_scores(blocks)
    logits = any(block.logits for block in blocks)
    even = not (cluster.interference or cluster.node_spread or cluster.step_spread)
    uneven_by_hand = noise.jitter or noise.straggle
    experts = job.model.active_parameters < job.model.parameters
    holding = {
        IDLE_RECOMPUTE: (work.recompute, work.attention) == ("selective", "flash")
        and work.selective == "scores",
        FEW_STATISTICS: work.again.of("attention") and work.attention == "flash",
        IDLE_CHECKPOINTING: "checkpointing" in asked
        and work.checkpointing == "reentrant"
        and not (work.again.kind == "full" or work.again.of("mlp")),
        EAGER_ATTENTION: plain and scores and work.attention == "eager",
        EAGER_LOSS: plain and logits and work.loss == "eager",
        SCALE: even and gpus > _FEW and not uneven_by_hand,
        IDLE_STACK: "stack" in asked and not cluster.gpu.stack,
        ADAPTERS: work.lora is not None,
        _off("experts"): experts,
        _off("context"): work.cp > 1,
        _off("narrow"): work.narrow is not None,
        PIPELINED: work.pp > 1 and _reduces_often(job.strategy),
    }
    lacks = [f"{WHAT_IF}{job.stack.name} has {text}" for text in job.lacks()]
    return (*lacks, *(text for text, holds in holding.items() if text and holds))


def is_how_far_off(note: str) -> bool:
    """Whether a note says how far off predictions of a kind were."""
    return note == ADAPTERS or note.endswith(OFF)


def _off(kind: str) -> str:
    """How far off predictions of published runs of a kind were; empty where none is known."""
    errors = error_model().kinds.get(kind)
    if errors is None:
        return ""
    runs, sources = counted(errors.runs, "published run"), counted(errors.sites, "source")
    return (
        f"{KIND_WORDS[kind]}: predictions of {runs} of {sources}, left out of the fit, are"
        f" {errors.mean:.0%} {OFF}"
    )


def _reduces_often(strategy: Strategy) -> bool:
    """Whether it is FSDP2 that keeps no unit whole, or reduces gradients in every micro-step."""
    if not isinstance(strategy, FSDP) or strategy.version == 1:
        return False
    return strategy.reshard_after_forward is not False or strategy.sync == "every"


def alike(notes: Iterable[Sequence[str]]) -> list[str]:
    """The remarks among the notes of results, once each."""
    return list(dict.fromkeys(note for of_result in notes for note in of_result if is_alike(note)))


def is_alike(note: str) -> bool:
    """Whether many results may have it: it says nothing of one alone."""
    return note in _ALIKE or is_how_far_off(note) or note.startswith((BATCH_OF, WHAT_IF))


def lacking(notes: Iterable[Sequence[str]]) -> list[str]:
    """What the stacks of results have not, each once: "torchtitan has no zero1"."""
    said = [note.removeprefix(WHAT_IF) for note in alike(notes) if note.startswith(WHAT_IF)]
    return list(dict.fromkeys(text.partition("; it has")[0] for text in said))


def own(notes: Sequence[str]) -> list[str]:
    """The notes that are of one result alone: what was chosen for it."""
    return [note for note in notes if not is_alike(note)]
