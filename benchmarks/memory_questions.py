"""Does it fit? Twenty questions of buyers, answered by co2sim and by PyTorch's trackers.

    python benchmarks/memory_questions.py            # 30 minutes
    python benchmarks/memory_questions.py --from 15  # the questions before it stay as they are
    python benchmarks/memory_questions.py --quick    # one question; keeps nothing

Writes memory_questions.csv: a row for each question, with what PyTorch allocates and reserves by
`memory_oracle.py` and the rules of its caching allocator, on whole models: a line through
fewer layers is exact for what is allocated, but not for what is reserved. A GPU also holds buffers
of NCCL and the CUDA context, which co2sim adds to both.
"""

import csv
import sys
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

from memory_oracle import LLAMA_1B, LLAMA_8B, LLAMA_70B
from oracle_training import Setting, measure
from reports import RESULTS, folder, made_by, parser, table

from co2sim.prediction.driver import simulate

NAME = "memory_questions.csv"
STACK = "torchtitan-eager"
GIB = 2.0**30


@dataclass(frozen=True)
class Question:
    """A setting as a buyer asks for it: on a cluster, with options of `simulate`."""

    model: str
    cluster: str
    gpus: int
    strategy: str = "fsdp"
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int = 8192

    def setting(self) -> Setting:
        """The same for PyTorch."""
        shape, layers = SHAPES[self.model]
        options = self.options
        tp = options.get("tp", 1)
        name, _, rest = self.strategy.partition(":")
        names = {"fsdp": "fsdp2+tp" if tp > 1 else "hsdp" if "shard" in rest else "fsdp2"}
        rule = options.get("optimizer", "adamw")
        return Setting(
            replace(shape, layers=layers, tokens=self.tokens),
            names.get(name, name),
            ranks=self.gpus,
            samples=options.get("micro_batch", 1),
            recompute=options.get("recompute", "none"),
            optimizer="adamw_fused" if rule == "adamw" else rule,
            reshard="reshard_after_forward=false" not in rest,
            shard=8 if "shard" in rest else 0,
            tp=tp,
            sequence_parallel=tp > 1,
            loss_parallel=tp > 1,
        )

    def answer(self) -> Any:
        """What co2sim says."""
        changes = {"model.seq_len": str(self.tokens)}
        if self.strategy == "ddp":
            changes["stack.autocast"] = "true"
        return simulate(
            self.cluster,
            self.model,
            self.strategy,
            gpus=self.gpus,
            stack=STACK,
            overrides=changes,
            global_batch=self.gpus // self.options.get("tp", 1) * self.options["micro_batch"],
            sequence_parallel=self.options.get("tp", 1) > 1,
            **self.options,
        )


SHAPES = {
    "llama3.2-1b": (LLAMA_1B, 16),
    "llama3-8b": (LLAMA_8B, 32),
    "llama3-70b": (LLAMA_70B, 80),
}


def _ask(model: str, cluster: str, gpus: int, *, tokens: int = 8192, **options: Any) -> Question:
    strategy = options.pop("strategy", "fsdp")
    return Question(model, cluster, gpus, strategy, {"micro_batch": 1, **options}, tokens)


QUESTIONS = (
    _ask("llama3-8b", "dgx-h100", 8, recompute="none"),
    _ask("llama3-8b", "dgx-h100", 8, micro_batch=4, recompute="none"),
    _ask("llama3-8b", "dgx-h100", 8, micro_batch=4, recompute="full"),
    _ask("llama3-8b", "dgx-h100", 8, micro_batch=2, recompute="selective"),
    _ask("llama3-8b", "dgx-h100", 64, micro_batch=2, recompute="none", tokens=4096),
    _ask("llama3-8b", "dgx-h100", 8, recompute="full", tokens=32768),
    _ask("llama3-8b", "dgx-h100", 8, recompute="none", tokens=32768),
    _ask("llama3-8b", "a100-40-1600g", 8, recompute="full", tokens=4096),
    _ask("llama3-8b", "a100-40-1600g", 64, recompute="full"),
    _ask("llama3-8b", "a100-40-1600g", 8, recompute="none", tokens=4096),
    _ask("llama3-8b", "dgx-h100", 8, recompute="full", strategy="fsdp:reshard_after_forward=false"),
    _ask("llama3-8b", "dgx-h100", 64, recompute="full", strategy="fsdp:shard=8"),
    _ask("llama3-8b", "dgx-h100", 8, recompute="full", strategy="ddp", tokens=4096),
    _ask("llama3.2-1b", "a100-40-1600g", 8, recompute="none", strategy="ddp", tokens=2048),
    _ask("llama3.2-1b", "dgx-h100", 8, micro_batch=8, recompute="none", strategy="ddp"),
    _ask("llama3-70b", "dgx-h100", 16, recompute="full"),
    _ask("llama3-70b", "dgx-h100", 32, recompute="full"),
    _ask("llama3-70b", "dgx-h100", 64, recompute="none"),
    _ask("llama3-70b", "dgx-h100", 64, recompute="full", tp=8, micro_batch=4),
    _ask("llama3-70b", "dgx-h100", 16, recompute="full", optimizer="adamw_8bit", tokens=4096),
)


def measured(number: int) -> dict[str, Any]:
    """Of a question: what PyTorch allocates and reserves, in bytes."""
    found = measure(QUESTIONS[number].setting(), allocator=True)[0]
    return {name: found[name] for name in ("peak_bytes", "reserved_bytes", "moment")}


def row(number: int, found: dict[str, Any]) -> dict[str, Any]:
    """The question beside both answers."""
    asked, answer = QUESTIONS[number], QUESTIONS[number].answer()
    items = answer.memory_bytes_per_gpu
    beside = items["nccl"] + items["context"]
    needed = found["reserved_bytes"] + beside
    return {
        "question": number,
        "model": asked.model,
        "cluster": asked.cluster,
        "gpus": asked.gpus,
        "strategy": asked.strategy,
        "tokens": asked.tokens,
        "options": "; ".join(f"{name}={value}" for name, value in asked.options.items()),
        **found,
        "needed_gib": round(needed / GIB, 2),
        "predicted_gib": round(items["total"] / GIB, 2),
        "low_gib": round((answer.memory_bytes_low or 0.0) / GIB, 2),
        "high_gib": round((answer.memory_bytes_high or 0.0) / GIB, 2),
        "gpu_gib": round(answer.gpu_memory_bytes / GIB, 2),
        "word": answer.memory_fit,
        "fits": needed <= answer.gpu_memory_bytes,
    }


def main() -> None:
    """Ask all, and write the table."""
    command = parser(__doc__, "one question")
    command.add_argument("--from", dest="first", type=int, default=0, choices=range(20))
    options = command.parse_args()
    numbers = [13] if options.quick else list(range(options.first, len(QUESTIONS)))
    rows: list[dict[str, Any]] = []
    if options.first:
        with (RESULTS / NAME).open(newline="") as file:
            rows = list(csv.DictReader(file))[: options.first]
    # A process for each question: all have a process group of their own.
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool, folder(options) as out:
        for number, found in zip(numbers, pool.imap(measured, numbers, chunksize=1), strict=True):
            rows.append(row(number, found))
            print(rows[-1], file=sys.stderr, flush=True)
            with (out / NAME).open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    shown = ("model", "gpus", "strategy", "options", "needed_gib", "predicted_gib", "word", "fits")
    print(table([{name: str(one[name]) for name in shown} for one in rows]))
    print(f"\n{made_by()}")


if __name__ == "__main__":
    main()
