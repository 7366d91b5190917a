"""Options that say what the training framework does with attention, activations and loss."""

from typing import Annotated

import typer

Attention = Annotated[
    str,
    typer.Option(
        help="flash (one kernel, the scores are never kept) or eager (products and softmax, the"
        " scores are kept)."
    ),
]
Recompute = Annotated[
    str,
    typer.Option(
        help="Activations to recompute: none, selective (the scores of eager attention), or full"
        " (only the inputs of layers are kept)."
    ),
]
Checkpointing = Annotated[
    str,
    typer.Option(
        help="How full recomputation runs a layer again: non_reentrant (up to its last product, as"
        " PyTorch does) or reentrant (all of it, as Megatron-LM and DeepSpeed do)."
    ),
]
Loss = Annotated[
    str,
    typer.Option(
        help="Cross entropy: fused (one kernel on 16-bit logits) or eager (PyTorch's, in fp32)."
    ),
]
Optimizer = Annotated[str, typer.Option(help="adamw or sgd.")]
