"""What CO2 itself costs: its hook at every step, and its outer step, with communication free.

    python benchmarks/overhead.py            # two minutes on one core
    python benchmarks/overhead.py --quick    # seconds, too few rounds to mean anything

Two copies of a small GPT train in turn, blocks of `tau` steps without and with CO2, in one process:
the mean over one worker needs no communication. Besides the blocks, every call of the hook is
timed on its own, since a fraction of a percent drowns in the noise of steps. Medians; writes
overhead.md.
"""

import sys
import time
from statistics import median

import torch
from reports import machine, made_by, parser, publish, table
from torch.nn import functional

from realrun.algorithms import CO2
from realrun.train.tasks.presets import GPTS, VOCABULARY
from realrun.train.tasks.text import GPT

STEP_LIMIT, ROUND_LIMIT = 0.01, 0.05
"""Shares of a step, and of a round, that the hook and the outer step may take."""

BATCH, TAU = 8, 12
WARM_UP = 3
"""Rounds that are not counted: the first have no average to use."""


class Training:
    """A GPT and its optimizer; steps on random characters."""

    def __init__(self, size: str, batch: int) -> None:
        torch.manual_seed(0)
        self.model = GPT(GPTS[size])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        shape = (batch, GPTS[size].context + 1)
        self.characters = torch.randint(0, VOCABULARY, shape)

    def steps(self, count: int) -> list[float]:
        """Seconds of each step."""
        found = []
        for _ in range(count):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            logits = self.model(self.characters[:, :-1])
            wanted = self.characters[:, 1:].reshape(-1)
            functional.cross_entropy(logits.flatten(0, 1), wanted).backward()
            self.optimizer.step()
            found.append(time.perf_counter() - start)
        return found


class TimedCO2(CO2):
    """CO2 that keeps how long every call of its hook took."""

    calls: list[float]

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        start = time.perf_counter()
        super()._after_step(optimizer)
        self.calls.append(time.perf_counter() - start)


def measure(
    size: str, batch: int, tau: int, rounds: int, **options: float | str
) -> dict[str, float]:
    """Medians in seconds: a step, a block without and with CO2, the hook, the outer step.

    CO2 as published, which does all of its outer step at the end of a round.
    """
    plain, ours = Training(size, batch), Training(size, batch)
    co2 = TimedCO2.published(ours.model, ours.optimizer, tau=tau, **options)  # type: ignore[arg-type]
    co2.calls = []
    steps, blocks, with_co2 = [], [], []
    for number in range(-WARM_UP, rounds):
        if number == 0:
            co2.calls = []
        turns = [(plain, blocks), (ours, with_co2)]
        for training, found in turns if number % 2 else reversed(turns):
            taken = training.steps(tau)
            if number >= 0:
                found.append(sum(taken))
                steps += taken if training is plain else []
    co2.close()
    measured = {
        "step": steps,
        "block": blocks,
        "with": with_co2,
        "hook": [seconds for index, seconds in enumerate(co2.calls) if (index + 1) % tau],
        "outer": co2.calls[tau - 1 :: tau],
    }
    return {name: median(seconds) for name, seconds in measured.items()}


def main() -> int:
    """Measure and write; exit code 1 if a limit is passed, but for --quick."""
    options = parser(__doc__, "the smallest model, three rounds").parse_args()
    torch.set_num_threads(1)
    sizes, rounds = (("tiny",), 3) if options.quick else (("mini", "small"), 20)
    rows, bad = [], 0
    for size in sizes:
        clipped = {"clip": 0.01, "staleness": 2}
        for name, extra in (("defaults", {}), ("clip, staleness 2", clipped)):
            found = measure(size, BATCH, TAU, rounds, **extra)
            hook, outer = found["hook"] / found["step"], found["outer"] / (TAU * found["step"])
            bad += hook >= STEP_LIMIT or outer >= ROUND_LIMIT
            rows.append(
                {
                    "GPT": size,
                    "parameters": f"{GPTS[size].parameters:,}",
                    "options": name,
                    "step ms": f"{found['step'] * 1e3:.1f}",
                    "hook us": f"{found['hook'] * 1e6:.1f}",
                    "of a step": f"{hook:.4%}",
                    "outer step ms": f"{found['outer'] * 1e3:.2f}",
                    f"of {TAU} steps": f"{outer:.2%}",
                    "block with CO2 / without": f"{found['with'] / found['block']:.3f}",
                }
            )
            print(*rows[-1].values(), file=sys.stderr)
    text = f"""\
# What CO2 as published costs when communication is free

One process, one thread, batches of {BATCH}, tau {TAU}, {rounds} rounds, medians. *Hook*: a\
 local step that does not close a round. *Outer step*: all that CO2 does at the end of a round.\
 {machine()}

{table(rows)}

{made_by()}
"""
    publish(options, "overhead", text)
    return 1 if bad and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())
