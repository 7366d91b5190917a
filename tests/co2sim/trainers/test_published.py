"""Published runs, asked by a file with their settings: the question is that of the archive."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from co2sim.catalog import Contents
from co2sim.catalog.facts import plain, read
from co2sim.prediction.question import Question
from co2sim.strategies import parse
from co2sim.strategies.fsdp import FSDP
from co2sim.trainers.reading import read_trainer

PAPERS = Path(__file__).parents[3] / "papers"

BRIDGE = """
NUM_GPUS=64
torchrun --nproc_per_node 8 --nnodes $((NUM_GPUS / 8)) pretrain_gpt.py --bf16 --fp8-format hybrid \\
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \\
  --group-query-attention --num-query-groups 8 --vocab-size 128256 --seq-length 8192 --swiglu \\
  --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \\
  --hidden-dropout 0.0 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 \\
  --num-layers-per-virtual-pipeline-stage 2 --sequence-parallel --use-distributed-optimizer \\
  --micro-batch-size 1 --global-batch-size 128
"""
TITAN = """
[model]
name = "llama3"
flavor = "70B"
converters = ["float8"]
[training]
local_batch_size = 16
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 32
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
STAGES = """
[model]
name = "llama3"
flavor = "405B"
converters = "float8"
[training]
local_batch_size = 32
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
pipeline_parallel_degree = 8
pipeline_parallel_microbatch_size = 4
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
NANOTRON = """
model: {model_config: {hidden_size: 2048, intermediate_size: 4096, num_hidden_layers: 24,
  num_attention_heads: 32, num_key_value_heads: 32, vocab_size: 50257, tie_word_embeddings: true}}
optimizer: {zero_stage: 1}
parallelism: {dp: 4, tp: 2, pp: 1, tp_mode: REDUCE_SCATTER}
tokens: {micro_batch_size: 8, batch_accumulation_per_replica: 32, sequence_length: 4096}
"""
ACCELERATE = """
accelerate launch --num_processes 4 --use_fsdp --mixed_precision bf16 train.py --bf16 \\
  --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 8 \\
  --gradient_checkpointing --block_size 4096 --fsdp full_shard
"""


@pytest.mark.parametrize(
    ("paper", "run", "name", "text"),
    [
        ("megatron_bridge", "142", "run.sh", BRIDGE),
        ("torchtitan_h100", "20", "run.toml", TITAN),
        ("torchtitan_h100", "32", "run.toml", STAGES),
        ("nanotron", "380", "run.yaml", NANOTRON),
        ("hf_accelerate", "343", "run.sh", ACCELERATE),
    ],
)
def test_a_file_asks_what_a_published_run_is(
    tmp_path: Path, paper: str, run: str, name: str, text: str
) -> None:
    """All that the archive says of its job, but for the stack's kernels and the cluster."""
    lines = [
        line for line in (PAPERS / paper / "runs.csv").read_text().splitlines() if line[0] != "#"
    ]
    row = next(row for row in csv.DictReader(lines) if row["id"] == run)
    path = tmp_path / name
    path.write_text(text)
    case = read_trainer(path).question(cluster=row["cluster"])
    published = Question(
        cluster=row["cluster"],
        model=row["model"],
        strategy=row["strategy"],
        gpus=row["gpus"],
        **{n: row.get(n) or 1 for n in ("tp", "cp", "pp", "interleave", "micro_batch")},
        sequence_parallel=row["sequence_parallel"] == "true",
        precision=row["precision"],
        recompute=row["recompute"],
        stack=row["stack"],
    )
    same = (
        "gpus",
        "tp",
        "cp",
        "pp",
        "interleave",
        "micro_batch",
        "precision",
        "recompute",
        "stack",
    )
    assert [getattr(case, n) for n in same] == [getattr(published, n) for n in same]
    assert case.sequence_parallel == published.sequence_parallel
    strategy = parse(row["strategy"])
    if isinstance(strategy, FSDP) and row["accumulation"] == "1":  # whose single step is the last
        strategy = replace(strategy, sync=case.parsed.sync)
    assert case.parsed == strategy
    steps = case.accumulation or case.global_batch * case.in_stage * case.pp // case.gpus
    assert steps // (case.micro_batch if case.accumulation is None else 1) == int(
        row["accumulation"]
    )
    if not isinstance(case.model, Contents):
        assert case.model == row["model"]
        return
    model = plain(read("models", row["model"]))
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "gated", "vocab", "tied", "norm")
    assert {n: case.model.tree.get(n) for n in sizes} == {n: model.get(n) for n in sizes}
