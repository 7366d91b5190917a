"""Twelve questions of buyers of clusters: what the commands answer, beside independent estimates.

    python benchmarks/buyer_questions.py            # some minutes
    python benchmarks/buyer_questions.py --quick    # three of them

Writes buyer_questions.md. Estimates are published, or by hand: 6 FLOP a parameter and token,
2 (n - 1) / n bytes a byte of an all-reduce, 16 bytes of states a parameter.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reports import machine, made_by, parser, publish, table

ROOT = Path(__file__).parents[1]
DAYS = "--tokens 1T -c dgx-h100 -m llama3-8b -s fsdp -g 128"
SLOW = '-c dgx-h100 -m llama3-8b -g 128 --set inter.bandwidth="100 Gbit/s"'
ONE = "--micro-batch 1 --accumulation 1"


@dataclass(frozen=True)
class Answer:
    """A number with the ends of its interval, if it has one, and its unit or words."""

    value: float
    low: float | None = None
    high: float | None = None
    words: str = ""

    def __str__(self) -> str:
        ends = "" if self.low is None else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{self.value:.3g}{ends} {self.words}"


@dataclass(frozen=True)
class Question:
    """A command, how its JSON is read, and what others say: the ends of a range."""

    number: str
    text: str
    command: str
    read: Callable[[Any], Answer]
    estimate: tuple[float, float] | None
    source: str

    def asked(self) -> tuple[Answer, float]:
        """What the command answers, and the seconds that it takes."""
        started = time.perf_counter()
        words = [sys.executable, "-m", "co2sim", *shlex.split(self.command), "--json"]
        with tempfile.TemporaryDirectory() as out:
            words += ["--out", out] if self.command.startswith("scale") else []
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
        return self.read(json.loads(done.stdout)), time.perf_counter() - started

    def row(self) -> dict[str, str]:
        """Of the table."""
        answer, took = self.asked()
        inside = "-"
        if self.estimate:
            low, high = answer.low or answer.value, answer.high or answer.value
            inside = "yes" if low <= self.estimate[1] and self.estimate[0] <= high else "NO"
        return {
            "": self.number,
            "question": self.text,
            "`co2sim ...`": f"`{self.command}`",
            "answer (90 %)": str(answer),
            "estimate": self.source,
            "within": inside,
            "s": f"{took:.1f}",
        }


def days(found: Any) -> Answer:
    """Of a training, as `run` or `plan` have it."""
    totals = found.get("choice", found)["totals"]
    return Answer(totals["days"], totals["days_low"], totals["days_high"], "days")


def step(found: Any) -> Answer:
    """Of one strategy."""
    speeds = [found[f"tokens_per_s{end}"] for end in ("", "_high", "_low")]
    times = [found["step_time_s"] * speeds[0] / speed for speed in speeds]
    return Answer(*times, "s")


def each_gpu(found: Any) -> Answer:
    """Tokens/s of a GPU, of what a plan chose."""
    result = found["choice"]["result"]
    speeds = [result[f"tokens_per_s{end}"] / result["gpus"] for end in ("", "_low", "_high")]
    return Answer(*speeds, "tokens/s of a GPU")


def ratio(words: str, over: int = 0, under: int = 1) -> Callable[[Any], Answer]:
    """Of the throughputs of two of several results."""

    def read(found: Any) -> Answer:
        rows = found["results"] if isinstance(found, dict) else found
        return Answer(rows[over]["tokens_per_s"] / rows[under]["tokens_per_s"], words=words)

    return read


def least(found: Any) -> Answer:
    """Of what meets the target of `solve`, in Gbit/s."""
    (answer,) = found[0]["answers"]
    ends = [answer[kind][0]["low"] * 8e-9 if answer[kind] else None for kind in ("met", "hoped")]
    assert ends[0]
    return Answer(ends[0], ends[1], float("inf"), "Gbit/s a node")


def turn(found: Any) -> Answer:
    """The price of the offer that was chosen at which another offer wins."""
    prices = [one for one in found["break_even"] if "price" in one["what"] and one["above"]]
    assert prices, found["answer"]
    choice = found["choice"]
    words = f"USD/h: {choice['gpus']} GPUs of {choice['cluster']} until then"
    return Answer(prices[0]["at"], words=words)


def fits(found: Any) -> Answer:
    """How many strategies fit, and which of those is fastest."""
    inside = [one for one in found if one["fits_in_memory"]]
    best = max(inside, key=lambda one: one["tokens_per_s"])
    return Answer(len(inside), words=f"of {len(found)} fit; fastest a step: {best['strategy']}")


def hours(found: Any) -> Answer:
    """Between failures."""
    return Answer(found[0]["mean_time_to_failure_s"] / 3600, words="h")


def used(found: Any) -> Answer:
    """The utilization from which owning wins."""
    ends = [100 * found[f"break_even{end}"] for end in ("", "_low", "_high")]
    return Answer(*ends, "% of the time")


QUESTIONS = (
    Question("1", "8B, 1T tokens, 128 H100", f"run {DAYS} --stack megatron-core", days,
             (9.0, 9.0), "9.0 days (NeMo, published)"),
    Question("1", "the same with torchtitan, compiled, one sequence a GPU",
             f"run {DAYS} {ONE}", days,
             (13.9, 13.9), "13.9 days (published, cards of 500 W)"),
    Question("1", "the same, not compiled", f"run {DAYS} --stack torchtitan-eager {ONE}", days,
             (16.1, 16.1), "16.1 days (published, cards of 500 W)"),
    Question("2", "its step with 100 Gbit/s a node, one sequence a GPU: DDP",
             f"run {SLOW} -s ddp {ONE}", step, (3.1, 3.3), "3.1 to 3.3 s by hand"),
    Question("2", "the same: FSDP", f"run {SLOW} -s fsdp {ONE}", step, (5.2, 5.4),
             "5.2 to 5.4 s by hand"),
    Question("3", "network for 90 % with ZeRO-1",
             'solve inter.bandwidth --for "efficiency=90%" -c examples/my-cluster.toml -m gpt2-xl'
             " -s zero1", least, (80, 250), "80 to 250 Gbit/s by hand, by accumulation"),
    Question("4", "HSDP over FSDP with 100 Gbit/s a node",
             f"scale {SLOW} -s fsdp:shard=node,reduce=bf16 -s fsdp", ratio("times as fast"),
             (1.2, 1.5), "about a third, by hand"),
    Question("5", "which of two offers for 8B, 1T tokens, in 30 days",
             "plan --tokens 1T -m llama3-8b -c examples/offer-a.toml -c examples/offer-b.toml"
             ' --deadline "30 days"', turn, None, "the price at which the choice turns"),
    Question("6", "70B, 1T tokens, 128 H100",
             "plan -c dgx-h100 -m llama3-70b -g 128 --stack megatron-core --tokens 1T", days,
             (81, 81), "81 days (NeMo, published: TP 4, CP 2, PP 4)"),
    Question("7", "405B on 2,304 H100",
             "plan -c dgx-h100 -m llama3-405b -g 2304 --global-batch 1008 --stack megatron-core"
             " --tokens 1T", each_gpu, (203, 203), "203 (NeMo, published: TP 8, CP 2, PP 9)"),
    Question("8", "two sites of 32 A100, 1 Gbit/s: DiLoCo on both over one site",
             "scale -c two-sites-wan -m gpt2-xl -s diloco:tau=100,worker=site -g 32,64",
             ratio("times as many tokens", 1, 0), (1.0, 2.0), "worth it with large batches"),
    Question("9", "failures on 1,024 GPUs",
             "goodput -c dgx-h100 -m llama3-8b -s fsdp -g 1024 --set failures=meta-rsc-1", hours,
             (7.9, 7.9), "every 7.9 h (Meta's RSC-1, measured)"),
    Question("10", "1.2B on 32 RTX 4090, 10 Gbit/s",
             "sweep -m llama3.2-1b -g 32 -c rtx3090-10x8 --set gpu=rtx4090 --set"
             ' inter.bandwidth="10 Gbit/s" --vary "strategy=ddp; zero2;'
             ' diloco:tau=100,worker=node; co2.published:tau=12,worker=node,inner=zero2"',
             fits, None,
             "DDP does not fit with fp32 states: ZeRO-2 or local updates"),
    Question("11", "own or rent 256 H100 for three years", "own -c dgx-h100 -g 256 --years 3",
             used, None, "-"),
    Question("12", "30B-A3B, 64 B200, fp8: NVL72 over nodes of 8",
             "sweep -m qwen3-30b-a3b -s zero1 --ep 8 -g 64 --stack megatron-core --precision fp8"
             ' --vary "cluster=gb200-nvl72, dgx-b200"', ratio("times as fast"), None, "-"),
)  # fmt: skip
QUICK = {"9", "11", "12"}


def report(questions: Sequence[Question]) -> str:
    """The page."""
    rows = [one.row() for one in questions]
    return f"""\
# Twelve questions of buyers

Each is one command; seconds are those of the whole process. Within: the estimate is in the 90 %
interval, or the answer in its range.

{table(rows)}

{machine()}

{made_by()}
"""


def main() -> None:
    """Ask, and write the table."""
    options = parser(__doc__, "three questions").parse_args()
    text = report([one for one in QUESTIONS if not options.quick or one.number in QUICK])
    publish(options, "buyer_questions", text)


if __name__ == "__main__":
    main()
