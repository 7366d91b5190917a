"""What the search of `co2sim plan` looks at and finds, beside published layouts and beside all.

    python benchmarks/plan_search.py            # minutes
    python benchmarks/plan_search.py --quick    # one plan, and few candidates of all

Writes plan_search.md.
"""

import time
from dataclasses import dataclass
from itertools import islice

from reports import machine, made_by, parser, publish, table

from co2sim import Question
from co2sim.prediction import driver
from co2sim.studies.candidates import Candidate, Objective, Space, candidates
from co2sim.studies.plan import plan

TOKENS = 1e12
SOURCE = """\
NVIDIA/dgxc-benchmarking at commit 143b90d (papers/dgxc_benchmarking/runs.csv), NeMo 24.09, bf16:
70B on 128 H100 with TP 4, CP 2, PP 4 and 5 chunks; 405B on 2,304 H100 with TP 8, CP 2, PP 9 and 7
chunks, and 1,008 sequences a step"""


@dataclass(frozen=True)
class PlanOf:
    """A plan of one offer; `published` is tokens/s of a GPU."""

    model: str
    gpus: str
    stack: str = ""
    global_batch: int | None = None
    published: float | None = None

    @property
    def space(self) -> Space:
        """All that is tried by default."""
        batch = {"stack": self.stack, "global_batch": self.global_batch}
        job = Question(cluster="", model=self.model, strategy="", **batch)  # type: ignore[arg-type]
        return Space(job=job, clusters=("dgx-h100",), gpus=self.gpus)


QUESTIONS = (
    PlanOf("llama3-8b", "8,16,32,64,128"),
    PlanOf("llama3-70b", "128"),
    PlanOf("llama3-70b", "128", "megatron-core", published=1112.29),
    PlanOf("llama3-405b", "2304", "megatron-core", 1008, 203.41),
)


def told(option: Candidate) -> str:
    """An option in a cell."""
    case = option.case
    parts = [option.result.strategy, case.mesh_words()]
    parts.append(f"micro-batch {case.micro_batch} x {option.result.accumulation}")
    parts += [f"recompute {case.recompute}"] * (case.recompute != "none")
    return ", ".join(filter(None, parts))


def row(one: PlanOf) -> dict[str, str]:
    """A plan, and how long it took."""
    started = time.process_time()
    found = plan(one.space, Objective(want="fastest", tokens=TOKENS))
    took = time.process_time() - started
    assert found.choice
    speed = found.choice.result.tokens_per_s_per_gpu
    return {
        "model": one.model,
        "GPUs": one.gpus,
        "stack": one.stack or "torchtitan",
        "candidates": f"{found.candidates:,}",
        "without room": f"{found.large:,}",
        "simulated": f"{found.simulated:,}",
        "s of a core": f"{took:.1f}",
        "choice": told(found.choice),
        "days": f"{found.choice.totals.days:.1f}",
        "tokens/s of a GPU": f"{speed:,.0f}",
        "published": f"{one.published:,.0f}" if one.published else "-",
        "ratio": f"{speed / one.published:.2f}" if one.published else "-",
    }


def against_all(count: int) -> str:
    """The time of simulating one candidate after the other, from the first `count` with room."""
    space = QUESTIONS[1].space
    every = candidates(space)
    total = sum(len(one.micro_batches) * len(one.recomputes) for one in every.setups)
    cases = list(islice(every.cases(space.headroom), None, None, max(1, total // 4 // count)))
    started = time.process_time()
    for case in cases[:count]:
        driver.run(case)
    each = (time.process_time() - started) / len(cases[:count])
    return (
        f"Of {QUESTIONS[1].model} on {QUESTIONS[1].gpus} GPUs, {len(cases[:count])} candidates with"
        f" room took {each:.2f} s each."
    )


def main() -> None:
    """Plan, and write the table."""
    options = parser(__doc__, "one plan").parse_args()
    rows = [row(one) for one in QUESTIONS[3 if options.quick else 0 :]]
    text = f"""\
# The search of `co2sim plan`

One offer (DGX H100), {TOKENS:.0e} tokens, all that is tried by default, the fastest. Seconds are
those of one core. Candidates that are neither without room nor simulated are slower by a bound
(co2sim/prediction/bounds.py). Published: {SOURCE}.

{table(rows)}

{against_all(2 if options.quick else 40)}

{machine()}

{made_by()}
"""
    publish(options, "plan_search", text)


if __name__ == "__main__":
    main()
