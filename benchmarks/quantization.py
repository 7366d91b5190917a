"""How long should blocks be that share a scale? Error, bytes and the loss after training.

    python benchmarks/quantization.py            # an hour on two cores; go on with the same
    python benchmarks/quantization.py --quick    # a tiny model, too short to mean anything

Weights as in qwZ and gradients as in qgZ of ZeRO++, and outer gradients of averages; int4 (to
nearest, stochastic, and with adaptive scales), int8 and fp8, in blocks of 32 to 4,096 elements.
Ranks are simulated in one process, and code with the functions of `realrun`. Nothing is tuned for
a code: all of a place train with one learning rate.

Finished trainings are rows of quantization-runs.csv, and not done again. Writes quantization.md
and quantization.png.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import astuple, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import matplotlib as mpl
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter, StrMethodFormatter
from quantization_codes import CODES
from quantization_training import PLACES, TAU, WORKERS, Place, train
from reports import folder, machine, made_by, parser, table
from torch import Generator, Tensor

from co2sim.console.figures import COLOURS, GRID, PLAIN_TEXT, STYLE, render
from co2sim.progress import progress_bar
from realrun.train.figure import MARKERS
from realrun.train.settings import TrainSettings
from realrun.train.tasks import make_task

RUNS = "quantization-runs.csv"
SIZES = tuple(2**power for power in range(5, 13))
"""Of blocks, for errors."""
TRAINED = (32, 256, 2048, 4096)
"""Of blocks, for losses."""
SEEDS = (0, 1, 2)
SIZE, STEPS = "mini", 256
RATE = 1e-2
"""The best of data-parallel training and of LocalSGD in convergence.md."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A training. Without a code nothing is quantized, and `block` is 0."""

    size: str
    steps: int
    place: Place
    code: str
    block: int
    seed: int


def asked(size: str, steps: int, blocks: tuple[int, ...], seeds: tuple[int, ...]) -> Iterator[Ask]:
    """All trainings; data-parallel ones without a code serve weights and gradients."""
    for seed in seeds:
        for place in PLACES[1:]:
            yield Ask(size, steps, place, "", 0, seed)
        for place in PLACES:
            for code in CODES:
                yield from (Ask(size, steps, place, code, block, seed) for block in blocks)


def settings(ask: Ask) -> TrainSettings:
    """How all train; a quick run on digits, which take no time."""
    return TrainSettings(
        task="text" if ask.size == SIZE else "digits",
        size=ask.size,
        steps=ask.steps,
        warmup=ask.steps // 16,
        lr=RATE,
        seed=ask.seed,
    )


def loss(ask: Ask) -> float:
    """Train once, on one core; the last validation loss."""
    torch.set_num_threads(1)
    task = make_task(settings(ask), torch.device("cpu"))
    return train(task, settings(ask), ask.place, CODES.get(ask.code), ask.block).loss


def complete(asks: list[Ask], path: Path) -> dict[Ask, float]:
    """Train what is missing in the file, two at a time; all losses."""
    known = read(path)
    missing = [ask for ask in asks if ask not in known]
    pool = ProcessPoolExecutor(2, get_context("spawn"))
    try:
        running = {pool.submit(loss, ask): ask for ask in missing}
        with progress_bar("trainings", shown=None) as bar:
            for count, done in enumerate(as_completed(running), 1):
                ask = running[done]
                known[ask] = done.result()
                row = pd.DataFrame([(*astuple(ask), known[ask])], columns=[*Ask.__slots__, "loss"])
                row.to_csv(path, mode="a", header=not path.exists(), index=False)
                if bar:
                    bar(count, len(missing))
    finally:
        pool.shutdown(cancel_futures=True)
    return known


def read(path: Path) -> dict[Ask, float]:
    """Finished trainings; none where there is no file."""
    if not path.exists():
        return {}
    frame = pd.read_csv(path, keep_default_na=False)
    return {Ask(*row[:-1]): row[-1] for row in frame.itertuples(index=False, name=None)}


def samples(size: str, steps: int) -> dict[Place, Tensor]:
    """What is sent in the last step of trainings of seed 0 without a code."""
    sent: dict[Place, Tensor] = {}
    for place in PLACES[1:]:
        ask = Ask(size, steps, place, "", 0, 0)
        task = make_task(settings(ask), torch.device("cpu"))
        sent |= train(task, settings(ask), place, None).sent
    return sent


def error(x: Tensor, code: str, block: int) -> float:
    """The norm of what is wrong, as a share of that of the tensor."""
    found = CODES[code].received(x[None], block, Generator().manual_seed(0))[0]
    return float((found - x).norm() / x.norm())


def of_errors(sent: dict[Place, Tensor]) -> str:
    """Tables of errors, a place each."""
    parts = []
    for place, x in sent.items():
        rows = [
            {"code": name} | {f"{block:,}": f"{error(x, name, block):.2%}" for block in SIZES}
            for name in CODES
        ]
        parts.append(f"### {place[0].upper()}{place[1:]}\n\n{table(rows)}\n")
    return "\n".join(parts)


def costs(found: dict[Ask, float], ask: Ask) -> float:
    """Loss of a training above that of the same seed without a code."""
    place: Place = "outer gradients" if ask.place == "outer gradients" else "gradients (qgZ)"
    return found[ask] - found[Ask(ask.size, ask.steps, place, "", 0, ask.seed)]


def of_losses(found: dict[Ask, float], asks: list[Ask]) -> str:
    """Tables of losses, a place each; mean and standard deviation over seeds."""
    parts = []
    seeds = sorted({ask.seed for ask in asks})
    for place in PLACES:
        rows = []
        for name, code in CODES.items():
            row = {"code": name}
            for block in sorted({ask.block for ask in asks if ask.code}):
                of = [a for a in asks if (a.place, a.code, a.block) == (place, name, block)]
                row[f"{block:,}"] = (
                    f"{cell([costs(found, ask) for ask in of])}"
                    f" ({code.bits_per_element(block):.3g} bits)"
                )
            rows.append(row)
        base = "outer gradients" if place == "outer gradients" else "gradients (qgZ)"
        plain = [found[a] for a in asks if (a.place, a.code) == (base, "") and a.seed in seeds]
        parts.append(
            f"### {place[0].upper()}{place[1:]}\n\nWithout a code: {cell(plain, '.3f')} nats.\n\n"
            f"{table(rows)}\n"
        )
    return "\n".join(parts)


def cell(values: list[float], form: str = "+.3f") -> str:
    """Mean and standard deviation."""
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):{form}}{spread}"


def report(found: dict[Ask, float], asks: list[Ask], sent: dict[Place, Tensor]) -> str:
    """The page of results."""
    one = asks[0]
    seeds = len({ask.seed for ask in asks})
    count = f"{len(next(iter(sent.values()))):,}"
    return f"""\
# Block sizes of quantization

## Error

Of the whole tensor: the norm of what is wrong, as a share of its norm. The tensors are those of a
model of {count} parameters (size {one.size}) in its last step: its weights, the gradient of one of
{WORKERS} workers, and what a worker has changed in {TAU} steps.

{of_errors(sent)}
## Loss

Task {settings(one).task}, {one.steps} steps of 32 samples, learning rate {RATE:g}, {seeds} seeds.
Loss at the end above that of the same seed without a code, and the bits that an element takes on
the wire, scales included. Weights and gradients: data-parallel, the gradients of {WORKERS} ranks in
two nodes, coded in the node and between nodes. Outer gradients: {WORKERS} workers, an average after
{TAU} steps, coded on both ways.

{of_losses(found, asks)}
{machine()}

{made_by()}
"""


def draw(found: dict[Ask, float], asks: list[Ask], sent: dict[Place, Tensor]) -> bytes:
    """Errors against bits above, losses against block sizes below; a column for each place."""
    with mpl.rc_context(STYLE | GRID | PLAIN_TEXT):
        figure = Figure(figsize=(11.0, 6.6), layout="constrained")
        above, below = figure.subplots(2, len(PLACES), sharey="row")
        for column, place in enumerate(PLACES):
            _draw_errors(above[column], sent[place])
            _draw_losses(below[column], found, [ask for ask in asks if ask.place == place])
            above[column].set_title(place)
        above[0].set_ylabel("error of the tensor")
        below[0].set_ylabel("loss above that without a code, nats")
        handles, labels = above[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
        return render(figure, "png")


def _draw_errors(axes: Axes, x: Tensor) -> None:
    for place, (name, code) in enumerate(CODES.items()):
        bits = [code.bits_per_element(block) for block in SIZES]
        errors = [error(x, name, block) for block in SIZES]
        axes.plot(bits, errors, label=name, **_look(place))
    axes.set(yscale="log", xlabel="bits an element, with scales")
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))


def _draw_losses(axes: Axes, found: dict[Ask, float], asks: list[Ask]) -> None:
    blocks = sorted({ask.block for ask in asks if ask.code})
    for place, name in enumerate(CODES):
        of = {b: [costs(found, a) for a in asks if (a.code, a.block) == (name, b)] for b in blocks}
        low, middle, high = ([f(of[b]) for b in blocks] for f in (min, mean, max))
        axes.plot(blocks, middle, **_look(place))
        axes.fill_between(blocks, low, high, color=COLOURS[place % len(COLOURS)], alpha=0.15, lw=0)
    axes.axhline(0, color="0.4", lw=0.8)
    axes.set(xscale="log", xlabel="elements of a block")
    axes.set_yscale("symlog", linthresh=0.02)
    axes.yaxis.set_major_locator(
        FixedLocator([-0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
    )
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xticks(blocks, [f"{block:,}" for block in blocks])
    axes.minorticks_off()


def _look(place: int) -> dict[str, str]:
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def main() -> None:
    """Train what is missing; write the tables and the figure."""
    given = parser(__doc__, "a tiny model").parse_args()
    size, steps = ("tiny", 4) if given.quick else (SIZE, STEPS)
    blocks, seeds = (TRAINED[1:2], SEEDS[:1]) if given.quick else (TRAINED, SEEDS)
    asks = list(asked(size, steps, blocks, seeds))
    with folder(given) as out:
        found = complete(asks, out / RUNS)
        sent = samples(size, steps)
        text = report(found, asks, sent)
        (out / "quantization.md").write_text(text, "utf-8")
        (out / "quantization.png").write_bytes(draw(found, asks, sent))
    print(text)


if __name__ == "__main__":
    main()
