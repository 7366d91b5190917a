"""Does it fit? Questions of buyers, beside what PyTorch's trackers and allocator say."""

import csv
from statistics import mean
from typing import Any

from places import ROOT

from co2sim.prediction.driver import simulate
from co2sim.prediction.result import Result
from co2sim.training.memory import GIB

ROWS = list(
    csv.DictReader(
        (ROOT / "benchmarks/results/memory_questions.csv").read_text("utf-8").splitlines()
    )
)


def answer(row: dict[str, str]) -> Result:
    """What co2sim says today."""
    options: dict[str, Any] = dict(part.split("=") for part in row["options"].split("; "))
    tp = int(options.get("tp", 1))
    changes = {"model.seq_len": row["tokens"]}
    if row["strategy"] == "ddp":
        changes["stack.autocast"] = "true"
    return simulate(
        row["cluster"],
        row["model"],
        row["strategy"],
        gpus=int(row["gpus"]),
        stack="torchtitan-eager",
        overrides=changes,
        global_batch=int(row["gpus"]) // tp * int(options["micro_batch"]),
        sequence_parallel=tp > 1,
        **{name: int(text) if text.isdecimal() else text for name, text in options.items()},
    )


def test_the_word_is_right() -> None:
    """It fits where co2sim says fits or tight, and nowhere else: in every row.

    The total is 6 % off on average.
    """
    answers = [answer(row) for row in ROWS]
    said = [result.memory_fit in {"fits", "tight"} for result in answers]
    assert said == [row["fits"] == "True" for row in ROWS]
    errors = [
        result.memory_bytes_per_gpu["total"] / GIB / float(row["needed_gib"]) - 1
        for result, row in zip(answers, ROWS, strict=True)
    ]
    assert mean(map(abs, errors)) < 0.06
