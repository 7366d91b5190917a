"""A model and how it is trained: parameters, FLOP and bytes of every block.

FLOP count a multiply-add as two. The model FLOP of a token follow PaLM (Chowdhery et al. 2022,
appendix B): 6 for every parameter that multiplies, plus 12 x layers x heads x head_dim x seq_len
for softmax attention, without a discount for causal masks. Norms, biases and activations are left
out. A backward pass is twice a forward pass; `recompute` adds to the hardware FLOP only, as
published figures count them: scores of attention, products of an MLP, or a whole forward pass.
What kernels execute is another matter: `Kernels` of a pass say it, and times follow from them.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from co2sim.common.errors import OptionError
from co2sim.common.units import Bytes, Flops
from co2sim.common.validation import whole
from co2sim.models.adapters import NF4, with_adapters
from co2sim.models.operators import (
    NARROW,
    Attention,
    Block,
    Model,
    kinds,
    shard_model,
)
from co2sim.schedule.mesh import Mesh
from co2sim.schedule.schedule import (
    Compute,
    DType,
)
from co2sim.training.framework import (
    Framework,
    Recomputation,
    Recompute,
    Rerun,
    layers,
    recomputation,
)
from co2sim.training.optimizer import ADAMW, FP32, Optimizer, Update
from co2sim.training.passes import Passes

Offload = Literal["none", "optimizer", "parameters", "activations"]
"""optimizer: its states are in the host's memory, and the host's processors update them (Ren et al.
2021, ZeRO-Offload, arXiv 2101.06840). parameters: these and gradients, too; a block's share comes
over the link before it is gathered (ZeRO-Infinity, arXiv 2104.07857; torch's CPUOffloadPolicy).
activations: what layers keep goes there behind their forward pass, and comes back for their
backward pass (torchtune, enable_activation_offloading; Megatron-LM, cpu_offloading)."""

QuantizeBase = Literal["none", "nf4"]
"""How frozen weights beside adapters are stored. nf4: in 4 bits (QLoRA, `adapters.NF4`)."""

Narrow = Literal["fp8", "mxfp8", "nvfp4"]
"""Types of matrix products below 16 bits. fp8: one scale for a tensor, from its own maximum. mxfp8:
one for 32 numbers. nvfp4: one in fp8 for 16 numbers, and one for the tensor. Sources: NVIDIA
Transformer Engine 2.0, docs/examples/fp8_primer; Open Compute Project, Microscaling Formats 1.0."""


MAX_SAMPLES = 10_000
"""Of a micro-batch, and micro-steps of a step: the schedule holds every micro-step."""

MAX_RANK = 65_536
"""Of adapters: wider than the layers of any model."""


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What one GPU does for one block and one micro-batch; `weights` is a part of `backward`."""

    block: Block
    forward: Compute
    backward: Compute
    weights: Compute


@dataclass(frozen=True)
class Workload(Mesh, Framework):
    """A model with its batch and precision, how GPUs divide it, and what the framework does."""

    model: Model
    micro_batch: int = 1
    """Samples per GPU and micro-step."""

    accumulation: int = 1
    """Micro-steps per optimizer step."""

    precision: DType = DType.BF16
    """Of weights, activations and results."""

    recompute: Recompute = "none"
    optimizer: Optimizer = ADAMW
    narrow: Narrow | None = None
    """The type that operands of the layers' products with weights are cast to, if any."""

    cast_steps: int = 1
    """The micro-steps for which weights stay cast: those of a step."""

    offload: Offload = "none"
    """What is in the host's memory."""

    divided_already: bool = False
    """Whether this is the share of one GPU."""

    lora: int | None = None
    """The rank of the layers' adapters, if any: only these are trained (`adapters`)."""

    quantize_base: QuantizeBase = "none"
    """How weights beside adapters are stored."""

    bare: Model | None = field(default=None, compare=False, repr=False)
    """The model without adapters."""

    def __post_init__(self) -> None:
        """Refuse batches that are not positive, and a recomputation that there is not.

        Gives the model adapters.
        """
        object.__setattr__(self, "recompute", str(recomputation(self.recompute)))
        super().__post_init__()
        for name in ("micro_batch", "accumulation"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, MAX_SAMPLES))
        self.check()
        if self.offload == "activations" and self.pp > 1:
            raise OptionError(
                f"offload=activations does not combine with pp={self.pp}, as in Megatron-LM"
            )
        if self.states_on_host and self.optimizer.needs_whole:
            raise OptionError(
                f"offload={self.offload} does not combine with optimizer={self.optimizer.name}: the"
                " speed of its matrix products on a host is not known"
            )
        quantized = self.quantize_base != "none"
        if quantized:
            self._check_quantized()
        if self.lora is None:
            return
        object.__setattr__(self, "lora", whole("lora", self.lora, 1, MAX_RANK))
        if self.bare is None:
            packing = NF4 / self.precision.bytes if quantized else 1.0
            object.__setattr__(self, "bare", self.model)
            object.__setattr__(self, "model", with_adapters(self.model, self.lora, packing))

    def _check_quantized(self) -> None:
        """Refuse what weights in 4 bits do not combine with."""
        reasons = {
            "needs lora, such as 16: weights in 4 bits are frozen": self.lora is None,
            f"does not combine with precision={self.narrow}: products are in the type that weights"
            " are made whole in": self.narrow is not None,
            "does not combine with stack.autocast": self.autocast,
        }
        for reason, holds in reasons.items():
            if holds:
                raise OptionError(f"quantize_base={self.quantize_base} {reason}")

    @property
    def parameters(self) -> int:
        """Parameters of the model, adapters included, as elements of `precision` in memory."""
        return self.model.stored

    @property
    def states_on_host(self) -> bool:
        """Whether optimizer states are in the host's memory."""
        return self.offload in {"optimizer", "parameters"}

    @property
    def trained(self) -> int:
        """Those that have gradients and optimizer states: all, or adapters."""
        return self.model.trained_parameters

    @cached_property
    def expert_parameters(self) -> int:
        """Those of the experts that a GPU has, where several divide them: of a `share`."""
        return sum(sum(block.experts) for block in self.model.blocks)

    @cached_property
    def trained_experts(self) -> int:
        """Those of `expert_parameters` that are trained."""
        return self.model.trained_experts

    def owned(self, shards: int) -> float:
        """Parameters that a GPU owns of its share, where `shards` data-parallel ones divide it.

        Experts are divided among those GPUs only that have the same ones.
        """
        return self._divided(self.parameters, self.expert_parameters, shards)

    def owned_trained(self, shards: int) -> float:
        """Those of `owned` that are trained."""
        return self._divided(self.trained, self.trained_experts, shards)

    def _divided(self, parameters: float, experts: float, shards: int) -> float:
        if shards == 1:
            return parameters
        return (parameters - experts) / shards + experts / self.expert_replicas(shards)

    @property
    def samples_per_gpu(self) -> int:
        """Samples that one GPU sees in an optimizer step: of tensor-parallel ones all the same."""
        return self.micro_batch * self.accumulation

    @cached_property
    def share(self) -> "Workload":
        """What one GPU does of it: its part of every block, and the exchanges between them.

        Raises OptionError for a model that cannot be divided so.
        """
        if self.divided_already or self.is_plain:
            return self
        model = shard_model(self.model, self, gathers_keys=self.gathers_keys)
        return replace(self, model=model, divided_already=True)

    def works(self) -> tuple[BlockWork, ...]:
        """Forward and backward work of every block; equal blocks share their works.

        Memory traffic is the least that the pass can do: the weights once, and every activation
        that is kept written once and read once; a backward pass moves twice as much.
        """
        return self._works

    @cached_property
    def _works(self) -> tuple[BlockWork, ...]:
        shared: dict[tuple[int, bool], tuple[Compute, Compute, Compute]] = {}
        works = []
        for block, executed, kind in self.executed:
            if kind not in shared:
                shared[kind] = self._pass.of(executed, trains=kind[0] >= self.model.first_trained)
            works.append(BlockWork(block, *shared[kind]))
        return tuple(works)

    @cached_property
    def executed(self) -> tuple[tuple[Block, Block, tuple[int, bool]], ...]:
        """Every block, its operators as they are executed, and which of them are alike."""
        made: dict[tuple[int, bool], Block] = {}
        rows = []
        for kind, block in zip(kinds(self.model), self.model.blocks, strict=True):
            alike = kind, self.repeats(block)
            if alike not in made:
                made[alike] = self.rerun.marked(
                    self._pass.executed(block, self.narrow, self.cast_steps)
                )
            rows.append((block, made[alike], alike))
        return tuple(rows)

    @cached_property
    def again(self) -> Recomputation:
        """What `recompute` says."""
        return recomputation(self.recompute)

    @cached_property
    def rerun(self) -> Rerun:
        """How blocks run again."""
        every = self.again.every
        names = frozenset(block.name for block in layers(self.model.blocks)[every - 1 :: every])
        stops = self.checkpointing == "non_reentrant"
        return Rerun(self.again, names, stops, self.selective == "products")

    def repeats(self, block: Block) -> bool:
        """Whether a backward pass begins with the block's forward pass."""
        return self.rerun.whole(block) and block.name not in self._untrained

    @cached_property
    def _untrained(self) -> frozenset[str]:
        """The names of the blocks that no gradient reaches."""
        return frozenset(block.name for block in self.model.blocks[: self.model.first_trained])

    @property
    def repeats_some(self) -> bool:
        """Whether selective recomputation is other than none."""
        return any(
            self.rerun.every_second(block) or any(map(self.rerun.of, block.of(Attention)))
            for _, block, _ in self.executed
        )

    @cached_property
    def _pass(self) -> Passes:
        habits = Framework.habits(self)
        return Passes(
            **habits,
            micro_batch=self.micro_batch,
            precision=self.precision,
            tp=self.tp,
            etp=self.etp,
        )

    @property
    def peak(self) -> str:
        """The peak, in files of GPUs, of most of its products."""
        return NARROW[self.narrow].peak if self.narrow else str(self.precision)

    def recomputed(self, work: BlockWork) -> tuple[Compute, Compute]:
        """A backward pass with full recomputation in two: the forward pass again, then the rest."""
        forward, whole = work.forward, work.backward
        block = next(made for block, made, _ in self.executed if block is work.block)
        return (
            replace(
                forward,
                kernel="recompute",
                kernels=self._pass.kernels(block, 0, again=True),
                exchanges=self._pass.exchanges(block, "recompute"),
            ),
            Compute(
                "backward",
                whole.flops - forward.flops,
                whole.memory_bytes,
                self._pass.kernels(block, 2),
                exchanges=self._pass.exchanges(block, "backward"),
            ),
        )

    @property
    def hardware_flops_per_sample(self) -> Flops:
        """FLOP of a training step on one sample as published figures count them.

        Full recomputation counts as a whole forward pass (8 per parameter and token), even where
        `checkpointing` leaves some of it out; what flash attention repeats is not counted.
        """
        works = self.works()
        return sum(work.forward.flops + work.backward.flops for work in works) / self.micro_batch

    @cached_property
    def update(self) -> Update:
        """What an optimizer step does. Raises OptionError as `Update.of` does."""
        return Update.of(self.model, self.optimizer, self.precision)

    def moments(self, shards: int) -> Bytes:
        """Optimizer states but for master copies that a GPU owns, where `shards` divide them."""
        dense, experts = self.update.states
        return self._divided(dense + experts, experts, shards)

    def optimizer_states(self, shards: int) -> Bytes:
        """The same with master copies, which parameters in fp32 are themselves."""
        copies = FP32 if self.update.has_copies else 0.0
        return self.moments(shards) + self.owned_trained(shards) * copies

    @property
    def gradient_bytes(self) -> Bytes:
        """Gradients per parameter, where all ranks or their owners hold them between passes.

        Source: Megatron-LM, docs/user-guide/features/dist_optimizer.md: 4 in bf16, 2 in fp16.
        """
        summed = self.main_gradients and self.precision is DType.BF16
        return DType.FP32.bytes if summed else self.precision.bytes
