"""What a training framework does with a model: the options that a schedule depends on."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from co2sim.common.validation import Quantity

Factor = Annotated[float, Quantity(least=1, most=100)]

AttentionKernel = Literal["flash", "eager"]
"""flash: one kernel that never writes the scores. eager: products and softmax, scores kept."""

Selective = Literal["scores", "products"]
"""What a framework repeats selectively. scores: those of eager attention (Megatron-LM). products:
all of a layer but attention and every second product with weights, whose results are kept
(torchtitan, torchtitan/distributed/activation_checkpoint.py, op)."""

Checkpointing = Literal["non_reentrant", "reentrant"]
"""How "full" runs a layer again, and "mlp" an MLP. non_reentrant: until the last tensor that the
backward pass needs is there, so not the last product, and not the head (PyTorch,
torch.utils.checkpoint, `set_checkpoint_early_stop`). reentrant: every block, or MLP, as a whole
(Megatron-LM, DeepSpeed)."""

Loss = Literal["fused", "eager"]
"""fused: the cross entropy in one kernel on 16-bit logits. eager: PyTorch's, in fp32."""

ContextKind = Literal["all_gather", "ring", "all_to_all"]
"""How ranks that divide sequences attend to all of them; see `ContextExchange`."""

TokenExchange = Literal["flat", "hierarchical"]
"""How tokens travel to experts. flat: to each expert apart. hierarchical: over the network once for
every node with some of their experts, and inside it to these; see `TokenRouting`."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What a training framework does with a model: all of a stack that a schedule depends on.

    `attention`, `loss` and `checkpointing` are what it does unless a job says another, `selective`
    what it repeats of a layer on request. `overlap` says whether it reduces gradients while the
    backward pass continues, `overlap_tensor` whether tensor-parallel GPUs exchange activations
    beside the products that need them, `overlap_experts` whether tokens travel to experts beside
    other passes, `experts_all_to_all` whether they cross the network for every expert or for every
    node of experts, and `keep_gathered` whether GPUs keep what they gathered, or gather it again to
    go back. `context` is how ranks that divide sequences exchange keys and values. With
    `main_gradients` it sums gradients of bf16 up in fp32; a layer keeps `kept` times the
    activations that its backward pass needs at least.
    """

    attention: AttentionKernel = "flash"
    loss: Loss = "fused"
    checkpointing: Checkpointing = "non_reentrant"
    selective: Selective = "scores"
    overlap: bool = True
    overlap_tensor: bool = False
    overlap_experts: bool = False
    experts_all_to_all: TokenExchange = "flat"
    keep_gathered: bool = False
    context: ContextKind = "all_gather"
    main_gradients: bool = False
    kept: Factor = 1.0

    def habits(self, **asked: Any) -> dict[str, Any]:
        """These fields by name, with what was `asked` for (and is not None) in their place."""
        chosen = {name: value for name, value in asked.items() if value is not None}
        return {field.name: getattr(self, field.name) for field in fields(Framework)} | chosen
