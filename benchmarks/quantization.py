"""How long should blocks be that share a scale? Error, bytes and the loss after training.

    python benchmarks/quantization.py            # an hour on two cores; go on with the same
    python benchmarks/quantization.py --quick    # a tiny model, too short to mean anything

Weights (qwZ) and gradients (qgZ) of ZeRO++, and outer gradients of averages; int4 (to nearest,
stochastic, with adaptive scales), int8 and fp8, in blocks of 32 to 4,096 elements. Ranks are
simulated in one process, and code with the functions of `realrun`; all of a place train with one
learning rate.

Finished trainings are rows of quantization-runs.csv, and not done again. Writes quantization.md.
"""

import copy
import sys
from argparse import Namespace
from collections.abc import Callable
from itertools import product
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from reports import machine, made_by, publish, table
from studies import SEEDS, Study, command
from torch import Generator, Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import AdamW

from co2sim.schedule.schedule import SCALE_BYTES
from realrun.algorithms.quantization import dequantize, quantize
from realrun.algorithms.quantization_format import SHARE, SMALLEST, TOP, Bits, Rounding
from realrun.train.settings import TrainSettings
from realrun.train.tasks.registry import make_task
from realrun.train.tasks.task import Task, loss_of, means, scores

_FP8 = torch.float8_e4m3fn
_CLIPS = tuple(1 - 0.05 * number for number in range(15))
"""Shares of a block's largest element, from 1 to 0.3, to choose its largest code from."""


class Code(NamedTuple):
    """What rows [rows, elements] of fp32 become on the way, in blocks of this size."""

    bits: int
    received: Callable[[Tensor, int, Generator], Tensor]

    def bits_per_element(self, block: int) -> float:
        """With the scale of its block."""
        return self.bits + 8 * float(SCALE_BYTES) / block


def _rounded(bits: Bits, rounding: Rounding) -> Callable[[Tensor, int, Generator], Tensor]:
    def received(rows: Tensor, block: int, generator: Generator) -> Tensor:
        source = generator if rounding == "stochastic" else None
        made = quantize(rows, bits, block, rounding, source)
        return dequantize(*made, bits, block, rows.shape[-1])

    return received


def _adaptive(rows: Tensor, block: int, _: Generator) -> Tensor:
    """int4, to nearest; the scale of each block leaves the least squared error of some.

    As in ACIQ (Banner, Nahshan and Soudry 2019), but the clipping is searched for.
    """
    blocks = _blocks(rows, block)
    largest = blocks.abs().amax(-1, keepdim=True)
    best, least = torch.zeros_like(blocks), torch.full_like(largest, torch.inf)
    for clip in _CLIPS:
        scales = (clip * largest * SHARE[4]).clamp_min(SMALLEST)
        tried = (blocks / scales).round().clamp(-TOP[4], TOP[4]) * scales
        error = (tried - blocks).square().sum(-1, keepdim=True)
        best = torch.where(error < least, tried, best)
        least = torch.minimum(error, least)
    return best.flatten(-2)[..., : rows.shape[-1]]


def _fp8(rows: Tensor, block: int, _: Generator) -> Tensor:
    """The type E4M3 of Micikevicius et al., FP8 Formats for Deep Learning, 2022 (448 at most)."""
    blocks = _blocks(rows, block)
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = (largest / torch.finfo(_FP8).max).clamp_min(SMALLEST)
    return ((blocks / scales).to(_FP8).float() * scales).flatten(-2)[..., : rows.shape[-1]]


def _blocks(rows: Tensor, block: int) -> Tensor:
    """Rows [rows, elements] as [rows, blocks, block], filled up with zeros."""
    return pad(rows, (0, -rows.shape[-1] % block)).unflatten(-1, (-1, block))


CODES = {
    "int4": Code(4, _rounded(4, "nearest")),
    "int4, stochastic": Code(4, _rounded(4, "stochastic")),
    "int4, adaptive": Code(4, _adaptive),
    "int8": Code(8, _rounded(8, "nearest")),
    "fp8 (E4M3)": Code(8, _fp8),
}

Place: TypeAlias = Literal["weights (qwZ)", "gradients (qgZ)", "outer gradients"]
PLACES: tuple[Place, ...] = get_args(Place)
BASE: dict[Place, Place] = dict.fromkeys(PLACES[:2], PLACES[1]) | {PLACES[2]: PLACES[2]}
"""Data-parallel trainings without a code serve weights and gradients."""

NODES, PER_NODE = 2, 2
WORKERS = NODES * PER_NODE
TAU = 12
"""Local steps of a round, where outer gradients travel."""

Send = Callable[[Tensor], Tensor]
"""What is received of rows [rows, elements] that are sent."""
Sent = dict[Place, Tensor]
"""Samples of what is sent: flat fp32, by place."""


def train(
    task: Task, settings: TrainSettings, place: Place, code: Code | None, block: int = 0
) -> tuple[float, Sent]:
    """The last loss, and what was sent, with a code at a place; None: as it is.

    Outer gradients are those of averages of 4 workers after every 12 steps (LocalSGD).
    """
    torch.manual_seed(settings.seed)
    model = task.model()
    chance = Generator().manual_seed(settings.seed)

    def send(rows: Tensor) -> Tensor:
        return code.received(rows, block, chance) if code else rows

    turn = _local if place == "outer gradients" else _steps
    sent = turn(model, task, settings, place, send)
    with torch.no_grad():
        total = torch.stack([scores(model, batch) for batch in task.validation]).sum(0)
    return means(total)[0], sent


def reduced(gradients: list[Tensor], send: Send) -> Tensor:
    """The mean of gradients of ranks as ZeRO++ makes it: a sum in each node, then of the nodes.

    As in `Reduce`, a row of the first exchange is what one rank of every node shall have.
    """
    parts = [_rows(one, WORKERS).view(NODES, PER_NODE, -1).transpose(0, 1) for one in gradients]
    inside = [send(one.flatten(1)).reshape(WORKERS, -1) for one in parts]
    sums = [torch.stack(inside[n * PER_NODE : (n + 1) * PER_NODE]).sum(0) for n in range(NODES)]
    total = torch.stack([send(one) for one in sums]).sum(0).view(PER_NODE, NODES, -1)
    return total.transpose(0, 1).flatten()[: len(gradients[0])] / len(gradients)


def averaged(displacements: list[Tensor], send: Send) -> Tensor:
    """The mean of displacements as `realrun.algorithms.averaging` makes it: coded on both ways."""
    count = len(displacements)
    mean = torch.stack([send(_rows(one, count)) for one in displacements]).sum(0) / count
    return send(mean).flatten()[: len(displacements[0])]


def _rows(vector: Tensor, count: int) -> Tensor:
    """A flat vector as equal rows, filled up with zeros."""
    return pad(vector, (0, -len(vector) % count)).view(count, -1)


def _steps(model: nn.Module, task: Task, of: TrainSettings, place: Place, send: Send) -> Sent:
    """Data-parallel steps; the model ends with its own weights, not with those that were sent."""
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=of.lr, weight_decay=of.weight_decay)
    ranks = WORKERS if place == "gradients (qgZ)" else 1
    sent: Sent = {}
    for step in range(1, of.steps + 1):
        own = parameters_to_vector(parameters).detach().clone()
        if place == "weights (qwZ)":
            seen = send(_rows(own, WORKERS)).flatten()[: len(own)]
            vector_to_parameters(seen.clone(), parameters)
        gradients = [_gradient(model, task, of, step, rank, ranks) for rank in range(ranks)]
        vector_to_parameters(own.clone(), parameters)
        _apply(optimizer, reduced(gradients, send) if ranks > 1 else gradients[0], of, step)
        sent = {"weights (qwZ)": own, "gradients (qgZ)": gradients[0]}
    return sent


def _local(model: nn.Module, task: Task, of: TrainSettings, _: Place, send: Send) -> Sent:
    """Rounds of local steps, and the average of what they changed."""
    models = [copy.deepcopy(model) for _ in range(WORKERS)]
    workers = [AdamW(m.parameters(), lr=of.lr, weight_decay=of.weight_decay) for m in models]
    anchor = parameters_to_vector(model.parameters()).detach().clone()
    sent: Sent = {}
    for step in range(1, of.steps + 1):
        for part, (one, worker) in enumerate(zip(models, workers, strict=True)):
            _apply(worker, _gradient(one, task, of, step, part, WORKERS), of, step)
        if step % TAU == 0 or step == of.steps:
            moved = [anchor - parameters_to_vector(one.parameters()).detach() for one in models]
            anchor = anchor - averaged(moved, send)
            for one in models:
                vector_to_parameters(anchor.clone(), one.parameters())
            sent = {"outer gradients": moved[0]}
    vector_to_parameters(anchor, model.parameters())
    return sent


def _gradient(
    model: nn.Module, task: Task, of: TrainSettings, step: int, part: int, parts: int
) -> Tensor:
    """The flat gradient of a share of the samples of a step."""
    loss = loss_of(model, task.batch(of.seed, step, of.batch, part, parts))
    found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return torch.cat([one.flatten() for one in found])


def _apply(optimizer: AdamW, gradient: Tensor, settings: TrainSettings, step: int) -> None:
    """An AdamW step by a gradient, clipped as in training."""
    (group,) = optimizer.param_groups
    for p, part in zip(
        group["params"], gradient.split([p.numel() for p in group["params"]]), strict=True
    ):
        p.grad = part.view_as(p).clone()
    group["lr"] = settings.learning_rate(step)
    if settings.clip_grad:
        nn.utils.clip_grad_norm_(group["params"], settings.clip_grad)
    optimizer.step()


RUNS = "quantization-runs.csv"
SIZES, TRAINED = tuple(2**power for power in range(5, 13)), (32, 256, 2048, 4096)
"""Of blocks: for errors, and for losses."""
SIZE, STEPS, RATE = "mini", 256, 1e-2
"""The rate is the best of data-parallel training and of LocalSGD in convergence.md."""


class Run(NamedTuple):
    """A training. Without a code nothing is quantized, and `block` is 0."""

    size: str
    steps: int
    place: Place
    code: str
    block: int
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        """In the table of runs."""
        return tuple(map(str, self))

    @property
    def lab(self) -> None:
        """Not in one."""


def grid(options: Namespace) -> list[Run]:
    """All trainings; data-parallel ones without a code serve weights and gradients."""
    size, steps = ("tiny", 4) if options.quick else (SIZE, STEPS)
    blocks, seeds = (TRAINED[1:2], SEEDS[:1]) if options.quick else (TRAINED, SEEDS)
    plain = [(place, "", 0) for place in PLACES[1:]]
    coded = list(product(PLACES, CODES, blocks))
    return [Run(size, steps, *how, seed) for seed in seeds for how in (*plain, *coded)]


def trained(run: Run) -> tuple[float, Sent]:
    """Train once, on one core; a quick run on digits, which take no time."""
    torch.set_num_threads(1)
    kind: dict[str, Any] = {"task": "text" if run.size == SIZE else "digits", "size": run.size}
    of = TrainSettings(**kind, steps=run.steps, warmup=run.steps // 16, lr=RATE, seed=run.seed)
    task = make_task(of.task, of.size, of.shape, torch.device("cpu"))
    return train(task, of, run.place, CODES.get(run.code), run.block)


def studies(options: Namespace) -> list[Study]:
    """The study: two ranks train a run each."""

    def loss(run: Run, *_: object) -> dict[str, float]:
        return {"loss": trained(run)[0]}

    runs = grid(options)
    return [Study(options.out / RUNS, Run._fields, ("loss",), lambda _: runs, loss, 2, apart=True)]


def of_errors(sent: Sent) -> str:
    """Tables of errors, a place each: norms of what is wrong, as shares of that of the tensor."""
    parts = []
    for place, x in sent.items():
        rows = []
        for name, code in CODES.items():
            row = {"code": name}
            for block in SIZES:
                found = code.received(x[None], block, Generator().manual_seed(0))[0]
                row[f"{block:,}"] = f"{float((found - x).norm() / x.norm()):.2%}"
            rows.append(row)
        parts.append(f"### {place[0].upper()}{place[1:]}\n\n{table(rows)}\n")
    return "\n".join(parts)


def costs(losses: dict[Run, float], run: Run) -> float:
    """Loss of a training above that of the same seed without a code."""
    return losses[run] - losses[run._replace(place=BASE[run.place], code="", block=0)]


def of_losses(losses: dict[Run, float], runs: list[Run]) -> str:
    """Tables of losses, a place each; mean and standard deviation over seeds."""
    parts = []
    blocks = sorted({run.block for run in runs if run.code})
    for place in PLACES:
        rows = []
        for name, code in CODES.items():
            row = {"code": name}
            for block in blocks:
                of = [r for r in runs if (r.place, r.code, r.block) == (place, name, block)]
                bits = f" ({code.bits_per_element(block):.3g} bits)"
                row[f"{block:,}"] = cell([costs(losses, run) for run in of]) + bits
            rows.append(row)
        plain = [losses[r] for r in runs if (r.place, r.code) == (BASE[place], "")]
        words = f"Without a code: {cell(plain, '.3f')} nats."
        parts.append(f"### {place[0].upper()}{place[1:]}\n\n{words}\n\n{table(rows)}\n")
    return "\n".join(parts)


def cell(values: list[float], form: str = "+.3f") -> str:
    """Mean and standard deviation."""
    return f"{mean(values):{form}}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def report(losses: dict[Run, float], runs: list[Run], sent: Sent) -> str:
    """The page of results."""
    first = runs[0]
    task = "text" if first.size == SIZE else "digits"
    seeds = len({run.seed for run in runs})
    count = f"{len(next(iter(sent.values()))):,}"
    return f"""\
# Block sizes of quantization

## Error

Of the whole tensor: the norm of what is wrong, as a share of its norm. The tensors are those of a
model of {count} parameters (size {first.size}) in its last step: its weights, the gradient of one
of {WORKERS} workers, and what a worker has changed in {TAU} steps.

{of_errors(sent)}
## Loss

Task {task}, {first.steps} steps of 32 samples, learning rate {RATE:g}, {seeds} seeds.
Loss at the end above that of the same seed without a code, and the bits that an element takes on
the wire, scales included. Weights and gradients: data-parallel, the gradients of {WORKERS} ranks in
two nodes, coded in the node and between nodes. Outer gradients: {WORKERS} workers, an average after
{TAU} steps, coded on both ways.

{of_losses(losses, runs)}
{machine()}

{made_by()}
"""


def write(options: Namespace) -> None:
    """Write quantization.md."""
    runs, rows = grid(options), studies(options)[0].rows()
    losses = {run: rows[run.key]["loss"] for run in runs}
    sent: Sent = {}
    for run in runs[:2]:  # what is sent in the last step without a code
        sent |= trained(run)[1]
    publish(options, "quantization", report(losses, runs, sent))


def main() -> int:
    """Train what is missing; write the tables."""
    return command(__doc__, "a tiny model", studies, write)


if __name__ == "__main__":
    sys.exit(main())
