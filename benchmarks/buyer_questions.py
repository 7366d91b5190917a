"""Eighteen questions of buyers of clusters: the first screens, beside independent estimates.

    python benchmarks/buyer_questions.py            # a minute or two
    python benchmarks/buyer_questions.py --quick    # three of them

Writes buyer_questions.md. Each question is the command that a buyer guesses first, without --json
and --full, and its answer is read from the first 15 lines of 100 columns. Estimates are published,
or by hand: 6 FLOP a parameter and token, at 38 to 46 % of the peak of an H100 and 45 to 55 % of an
A100; 2 (n - 1) / n bytes a byte of an all-reduce; 16 bytes of states a parameter.
"""

import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from reports import machine, made_by, parser, publish, table

from co2sim.report.text.screen import LINES, WIDTH

ROOT = Path(__file__).parents[1]
OFFERS = " ".join(f"-c examples/offer-{name}.toml" for name in "abc")
DAYS = "--tokens 1T -c dgx-h100 -m llama3-8b -s fsdp -g 128"
SLOW = '-c dgx-h100 -m llama3-8b -g 128 --set inter.bandwidth="100 Gbit/s"'
ONE = "--micro-batch 1 --accumulation 1"
CARDS = f'{ONE} --set gpu.memory_bandwidth="2.4 TB/s"'
"""One sequence a GPU, and the memory of the cards of torchtitan's published runs."""
DEADLINE = (datetime.now(UTC) + timedelta(days=92)).date().isoformat()

NUMBER = r"[\d,]+(?:\.\d+)?"
VALUE = rf"(?P<value>{NUMBER})"
ENDS = rf"\(90 %: (?P<low>{NUMBER})[ A-Za-z]*? to (?P<high>{NUMBER})[^)]*\)"
IN_DAYS = rf"{VALUE} days {ENDS}"
SPEED = rf"{VALUE} tokens/s {ENDS}"
OF_A = rf"(?P<answer>Take [\d,]+ GPUs of offer-a .*? {VALUE} USD {ENDS})"
"""What a plan takes, where it is offer A; the numbers are its money."""


@dataclass(frozen=True)
class Question:
    """A command, how its first screen is read, and what others say: the ends of a range.

    `pattern` finds the answer in the lines as one: its `value`, in units of the estimate, and the
    ends of its interval, `low` and `high`, if it has one. Where it has a value to compare with,
    `over`, the answer is the ratio. Shown is `answer`, with what is `beside` it, or all that was
    found.
    """

    number: int
    text: str
    command: str
    pattern: str
    estimate: tuple[float, float]
    source: str

    def row(self) -> dict[str, str]:
        """Of the table."""
        screen, cpu, wall = self._screen()
        lines = screen.splitlines()
        found = re.search(self.pattern, " ".join(" ".join(lines[:LINES]).split()))
        wide = max(map(len, lines), default=0) > WIDTH
        return {
            "": str(self.number),
            "question": self.text,
            "`co2sim ...`": f"`{self.command}`",
            "answer": _shown(found) if found else "NOT FOUND",
            "estimate": self.source,
            "within": "yes" if found and self._within(found) else "NO",
            "lines": f"{len(lines)}{' (too wide)' if wide else ''}",
            "s of a core": f"{cpu:.1f}",
            "s": f"{wall:.1f}",
        }

    def _screen(self) -> tuple[str, float, float]:
        """What the command prints, the seconds of its processes, and those on the clock."""
        words = [sys.executable, "-m", "co2sim", *shlex.split(self.command)]
        before, started = _used(), time.perf_counter()
        with tempfile.TemporaryDirectory() as out:
            words += ["--out", out] if self.command.startswith("scale") else []
            done = subprocess.run(
                words,
                cwd=ROOT,
                env=os.environ | {"COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
        wall = time.perf_counter() - started
        return done.stdout + done.stderr, _used() - before, wall

    def _within(self, found: re.Match[str]) -> bool:
        """Whether the answer and the estimate have a value in common."""
        read = {
            name: float(text.replace(",", ""))
            for name, text in found.groupdict().items()
            if text and name not in {"answer", "beside"}
        }
        value = read["value"] / read.get("over", 1.0)
        low, high = read.get("low", value), read.get("high", value)
        return low <= self.estimate[1] and self.estimate[0] <= high


def _shown(found: re.Match[str]) -> str:
    """The words of an answer."""
    parts = found.groupdict()
    if over := parts.get("over"):
        ratio = float(parts["value"].replace(",", "")) / float(over.replace(",", ""))
        return f"{ratio:.2f}: {parts['value']} over {over} tokens/s"
    said = [parts[name] for name in ("answer", "beside") if parts.get(name)]
    return "; ".join(said) or found[0]


def _used() -> float:
    """Seconds of the processes that were started from here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


QUESTIONS = (
    Question(1, "8B, 1T tokens, 128 H100", f"run {DAYS} --stack megatron-core", IN_DAYS,
             (9.0, 9.0), "9.0 days (NeMo, published)"),
    Question(1, "the same with torchtitan, compiled, on the cards that were published",
             f"run {DAYS} {CARDS}", IN_DAYS,
             (13.9, 13.9), "13.9 days (published; cards of 500 W, which is not modelled)"),
    Question(1, "the same, not compiled", f"run {DAYS} --stack torchtitan-eager {CARDS}", IN_DAYS,
             (16.1, 16.1), "16.1 days (published; cards of 500 W, which is not modelled)"),
    Question(2, "its speed with 100 Gbit/s a node, one sequence a GPU: DDP",
             f"run {SLOW} -s ddp {ONE}", SPEED, (318e3, 338e3),
             "318,000 to 338,000: 1,048,576 tokens in 3.1 to 3.3 s, by hand"),
    Question(2, "the same: FSDP", f"run {SLOW} -s fsdp {ONE}", SPEED, (164e3, 194e3),
             "164,000 to 194,000 by hand: 16 + 16 + 32 GB at 12 GB/s are 5.35 s, and NCCL was 3 to"
             " 18 % slower than that (NVIDIA/nccl issues 1229 and 1218)"),
    Question(3, "network for 90 % with ZeRO-1",
             'solve inter.bandwidth --for "efficiency=90%" -c examples/my-cluster.toml -m gpt2-xl'
             " -s zero1", rf"at least {VALUE} Gbit/s", (80, 250),
             "80 to 250 Gbit/s by hand, by accumulation"),
    Question(4, "HSDP over FSDP with 100 Gbit/s a node",
             f"scale {SLOW} -s fsdp:shard=node,reduce=bf16 -s fsdp",
             rf"fsdp\(node,bf16\) {VALUE}.*? fsdp (?P<over>{NUMBER})",
             (1.2, 1.5), "a ratio of 1.2 to 1.5: about a third, by hand"),
    Question(5, "which of two offers for 8B, 1T tokens, in 30 days",
             "plan --tokens 1T -m llama3-8b -c examples/offer-a.toml -c examples/offer-b.toml"
             ' --deadline "30 days"', OF_A, (87e3, 105e3),
             "offer A, 87,000 to 105,000 USD by hand: 29,400 to 35,600 GPU-hours at 2.95; B takes"
             " 78,000 to 95,500 at 1.40, 109,000 to 134,000 USD"),
    Question(6, "70B, 1T tokens, 128 H100",
             "plan -c dgx-h100 -m llama3-70b -g 128 --stack megatron-core --tokens 1T", IN_DAYS,
             (81, 81), "81 days (NeMo, published: TP 4, CP 2, PP 4)"),
    Question(7, "405B, 1T tokens, 2,304 H100",
             "plan -c dgx-h100 -m llama3-405b -g 2304 --global-batch 1008 --stack megatron-core"
             " --tokens 1T", IN_DAYS, (24.7, 24.7),
             "24.7 days (NeMo, published: 203 tokens/s of a GPU with TP 8, CP 2, PP 9)"),
    Question(8, "two sites of 32 A100, 1 Gbit/s: one alone over DiLoCo on both",
             "scale -c two-sites-wan -m gpt2-xl -s diloco:tau=100,worker=site -g 32,64",
             rf"one site alone[^,]*, [^,]* GPUs with [^:]*: {NUMBER} tokens/s, {VALUE} times"
             " as many, and [^ ]* times as fast",
             (0.69, 0.76), "0.69 to 0.76 by hand: a round of 100 steps of 1M tokens takes 102 to"
             " 137 s (16,000 to 12,000 tokens/s a GPU), and 6.2 GB over 0.118 GB/s 53 s"),
    Question(9, "failures on 1,024 GPUs",
             "goodput -c dgx-h100 -m llama3-8b -s fsdp -g 1024 --set failures=meta-rsc-1",
             rf"one in {VALUE} h", (7.9, 7.9), "every 7.9 h (Meta's RSC-1, measured)"),
    Question(10, "1.2B on 32 RTX 4090, 10 Gbit/s: local updates over ZeRO-2",
             "sweep -m llama3.2-1b -g 32 -c rtx3090-10x8 --set gpu=rtx4090 --set"
             ' inter.bandwidth="10 Gbit/s" --vary "strategy=ddp; zero2;'
             ' diloco:tau=100,worker=node; co2.published:tau=12,worker=node,inner=zero2"',
             rf"ddp {NUMBER} .*? zero2 (?P<over>{NUMBER}) .*? co2.published\(12,node\) {VALUE}",
             (1.8, 3.5), "a ratio of 1.8 to 3.5 by hand: ZeRO-2 sends 7.4 to 9.9 GB at 1.17 GB/s,"
             " and 1M tokens take 4 s at 45 % of the peak; DDP has 24 GB with its logits"),
    Question(11, "own or rent 256 H100 for three years", "own -c dgx-h100 -g 256 --years 3",
             rf"costs more than {VALUE} USD a GPU-hour \((?P<low>{NUMBER}) to (?P<high>{NUMBER})\)",
             (1.8, 2.5), "1.8 to 2.5 USD by hand: 12 to 17 million USD less resale, over 6.73"
             " million GPU-hours"),
    Question(12, "30B-A3B, 64 B200, fp8: NVL72 over nodes of 8",
             "sweep -m qwen3-30b-a3b -s zero1 --ep 8 -g 64 --stack megatron-core --precision fp8"
             ' --vary "cluster=gb200-nvl72, dgx-b200"',
             rf"memory gb200-nvl72 {VALUE} .*? dgx-b200 (?P<over>{NUMBER})", (1.05, 1.3),
             "a ratio of 1.05 to 1.3 by hand: 11 % more peak, and no exchange leaves NVLink"),
    Question(13, "which of three offers for 8B, 2T tokens, by a date",
             f"plan --tokens 2T -m llama3-8b {OFFERS} --deadline {DEADLINE}", OF_A, (173e3, 210e3),
             "offer A, 173,000 to 210,000 USD by hand: 58,800 to 71,000 GPU-hours at 2.95; C asks"
             " for 898,560"),
    Question(14, "a contract over 128 H200 of 90 days for 8B, 2T tokens",
             "run -c examples/offer-c.toml -m llama3-8b -s fsdp --tokens 2T",
             rf"{VALUE} USD {ENDS}", (899_250, 901_520),
             "899,250 to 901,520 USD by hand: 128 x 2,160 h x 3.25, and 50 TB for 21 days or for 90"
             " at 20 a month"),
    Question(15, "8B, 15T tokens, 512 H100; and a whole training",
             "run -c dgx-h100 -m llama3-8b -s fsdp -g 512 --tokens 15T",
             rf"(?P<answer>{IN_DAYS}).*? whole (?P<beside>[^:]*: {NUMBER} times this answer)",
             (35.3, 43.5),
             "35 to 44 days by hand, at 38 to 46 % of the peak; Llama 3.1 8B took 1.46M H100-hours"
             " for as many (its card): 119 days of 512"),
    Question(16, "ViT-B/16, 300 epochs of ImageNet, 8 A100",
             "run -c dgx-a100 -m vit-b16 -s ddp -g 8 --tokens 384M", rf"{VALUE} h {ENDS}",
             (9.0, 12.8),
             "9.0 to 12.8 h by hand: 3 x 35.1 GFLOP an image, 35 to 50 % of the peak: 1,040 to"
             " 1,490 images/s a GPU"),
    Question(17, "two sites of one's own of 32 H100 each, 10 Gbit/s: 8B, 100B tokens",
             "run -c examples/my-sites.toml -m llama3-8b -s diloco:tau=100,worker=site"
             " --tokens 100B", IN_DAYS, (1.98, 2.39),
             "1.98 to 2.39 days by hand: 7,800 to 9,400 tokens/s a GPU, less 3 %: 32 GB over 1.18"
             " GB/s each 100 steps of 8.5 s"),
    Question(18, "memory of a LoRA of 8B on one H100",
             "run -c dgx-h100 -m llama3-8b -s ddp -g 1 --lora 16",
             rf"memory [^(]*? {VALUE} GB of [^(]*{ENDS}", (65, 80),
             "65 to 80 GB by hand: 16.1 of weights, 0.7 of 42M trained, 168 kB a token and layer"
             " of activations, 44 in all, and 6 to 10 of logits"),
)  # fmt: skip
QUICK = {9, 11, 14}


def report(questions: Sequence[Question]) -> str:
    """The page."""
    rows = [one.row() for one in questions]
    return f"""\
# Eighteen questions of buyers

Each is one command, and the answer is what its first {LINES} lines say. Within: the estimate and
the 90 % interval of the answer, or the answer, have a value in common. Lines are those of {WIDTH}
columns; seconds of a core are those of the whole process, beside those on the clock.

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
