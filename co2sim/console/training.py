"""Options that say what the training framework does with a job, its activations and its loss."""

from functools import partial
from typing import Annotated

import typer

from co2sim import convert

Precision = Annotated[
    str | None,
    typer.Option(help="bf16, fp16 or fp32; default: bf16 if the GPU has it, else fp16."),
]
Accumulation = Annotated[
    int,
    typer.Option(
        parser=partial(convert.whole, "--accumulation"),
        metavar="N",
        help="Micro-steps per optimizer step.",
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        parser=partial(convert.whole, "--global-batch"),
        metavar="N",
        help="Samples per optimizer step over all GPUs; sets the accumulation.",
    ),
]
Tp = Annotated[
    int,
    typer.Option(
        "--tp",
        parser=partial(convert.whole, "--tp"),
        metavar="N",
        help="GPUs of a node that share every layer (tensor parallelism), and train on the same"
        " samples.",
    ),
]
Pp = Annotated[
    int,
    typer.Option(
        "--pp",
        parser=partial(convert.whole, "--pp"),
        metavar="N",
        help="Stages of a pipeline (1F1B), each with a part of the layers.",
    ),
]
Interleave = Annotated[
    int,
    typer.Option(
        "--interleave",
        parser=partial(convert.whole, "--interleave"),
        metavar="N",
        help="Chunks of layers of each stage of a pipeline.",
    ),
]
SequenceParallel = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel",
        help="Let GPUs that share layers divide the sequence between matrix products, too.",
    ),
]

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


def pipeline(*, pp: Pp = 1, interleave: Interleave = 1) -> dict[str, int]:
    """Of a case: its pipeline."""
    return {"pp": pp, "interleave": interleave}
