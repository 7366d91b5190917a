"""What `fidelity.py` runs: labs, models and strategies."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from realrun.launch.lab_plan import Lab

MODELS = ("tiny-5m", "tiny-23m")
LAYOUTS = ((2, 1), (4, 1), (2, 2))
RATES = ("300 Mbit/s", "1 Gbit/s", "3 Gbit/s")
STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zeropp",
    "local_sgd:tau=4",
    "overlap_local_sgd:tau=4",
    "slowmo:tau=4",
    "diloco:tau=4,dtype=int4",
    "co2:tau=4",
)
BY_NODE = {"local_sgd:tau=4": "local_sgd:tau=4,worker=node", "co2:tau=4": "co2:tau=4,worker=node"}
"""On nodes of several ranks these run with one worker per node."""


@dataclass(frozen=True, slots=True)
class LabJob:
    """A lab, and what runs there."""

    lab: Lab
    model: str
    strategies: tuple[str, ...]


def sleep_jobs() -> Iterator[LabJob]:
    """All strategies in all labs; the two models take turns."""
    for number, ((nodes, per_node), rate) in enumerate(itertools.product(LAYOUTS, RATES)):
        for which, model in enumerate(MODELS):
            chosen = STRATEGIES[(number + which) % 2 :: 2]
            named = tuple(BY_NODE.get(s, s) if per_node > 1 else s for s in chosen)
            yield LabJob(Lab(nodes, per_node, rate), model, named)


def flops_jobs() -> Iterator[LabJob]:
    """Two ranks, so that each has a core to itself."""
    for number, rate in enumerate(RATES):
        yield LabJob(Lab(2, 1, rate), "tiny-5m", STRATEGIES[number % 2 :: 2])


def turns_jobs() -> Iterator[LabJob]:
    """Two ranks again; few local steps, so that a round is short."""
    for rate in ("400 Mbit/s", "1.5 Gbit/s"):
        yield LabJob(Lab(2, 1, rate), "tiny-5m", ("ddp", "zero3", "zeropp", "co2:tau=2"))


def hiding_jobs() -> Iterator[LabJob]:
    """Enough local steps to hide an average of 0.9 s, and the same without hiding."""
    yield LabJob(Lab(4, 1, "300 Mbit/s"), "tiny-5m", ("co2:tau=8", "local_sgd:tau=8", "ddp"))


SITES = (
    "co2:tau=8,worker=site",
    "co2:tau=8,delay=4,worker=site,inner=fsdp",
    "diloco:tau=8,worker=site,inner=zero3",
    "diloco:tau=8,fragments=4,delay=2,worker=site,inner=fsdp",
    "local_sgd:tau=8,worker=site,inner=ddp",
    "co2:tau=8",
    "zero2",
)
"""With a site, or a GPU, as the worker, and one strategy over both sites."""


def sites_jobs() -> Iterator[LabJob]:
    """Two sites of two nodes, at two rates between them."""
    for wan in ("50 Mbit/s", "200 Mbit/s"):
        yield LabJob(Lab(4, 1, "1 Gbit/s", sites=2, wan=wan), "tiny-5m", SITES)


def quick_jobs() -> Iterator[LabJob]:
    """One small lab."""
    yield LabJob(Lab(2, 1, "3 Gbit/s"), "tiny-5m", ("ddp", "co2:tau=4"))


JOBS = {"sleep": sleep_jobs, "flops": flops_jobs, "hiding": hiding_jobs, "sites": sites_jobs}

INVENTED = (
    "ddp:bucket_mib={bucket}",
    "zero1",
    "zero2",
    "zero3",
    "zero3:gathers=2",
    "zeropp",
    "zeropp:qwz=false",
    "zeropp:hpz=false",
    "local_sgd:tau={tau}",
    "overlap_local_sgd:tau={tau}",
    "diloco:tau={tau},dtype=int8",
    "diloco:tau={tau},fragments=2,delay=1",
    "co2:tau={tau}",
    "co2:tau={tau},dtype=int8",
)


def invented_jobs(seed: int, labs: int, models: Path) -> Iterator[LabJob]:
    """Two strategies in every lab, all of it drawn; the models are written to a folder."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(labs):
        nodes, per_node = draw.choice(((2, 1), (3, 1), (4, 1), (2, 2)))
        rate = round(math.exp(draw.uniform(math.log(250), math.log(2200))))
        layers, width, ffn = draw.randint(2, 8), 64 * draw.randint(2, 8), draw.choice((2, 3, 4))
        vocabulary, length = 512 * draw.randint(2, 20), 256 * draw.randint(1, 8)
        path = models / f"{layers}x{width}x{ffn}-v{vocabulary}-s{length}.toml"
        path.write_text(
            f'name = "{path.stem}"\nkind = "transformer"\nsource = "drawn from a seed"\n'
            f"layers = {layers}\nhidden = {width}\nheads = 4\nffn = {ffn * width}\n"
            'gated = false\nbias = false\nnorm = "layernorm"\ntied = true\n'
            f"vocab = {vocabulary}\nseq_len = {length}\n"
        )
        chosen = (
            text.format(bucket=draw.choice((0.5, 2, 8)), tau=draw.randint(2, 6))
            for text in draw.sample(INVENTED, 2)
        )
        yield LabJob(Lab(nodes, per_node, f"{rate} Mbit/s"), str(path), tuple(chosen))
