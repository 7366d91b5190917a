"""Wall-clock to a given loss in the lab: predicted by co2sim before, measured after.

    sudo python benchmarks/time_to_loss.py             # about 9 minutes on two cores
    sudo python benchmarks/time_to_loss.py --quick     # a trial of seconds

DDP, DiLoCo, which waits for its averages, and CO2, which hides them, train the same small GPT on
four nodes at 100 and at 1000 Mbit/s. What goes into a prediction is known before anything is run at
that rate:

- how many steps the loss takes: from a run of the same training without a lab, whose seed is the
  same: network and clock do not change what is learned;
- the time of a local step: from a calibration in a lab of the same nodes in which nothing is sent
  (local_sgd with a tau beyond its end): it holds that the ranks share the cores;
- all communication: from the rate at which the lab is built, by co2sim. It runs the model of
  `realrun train --describe` on a GPU that takes the calibrated time for a step.

Learning rates and outer steps are those of convergence.csv, where there is one. Measured seconds
are rank 0's, and count all but validation, which comes after the training. Writes time_to_loss.csv,
time_to_loss.md and time_to_loss.png.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd
from reports import RESULTS, folder, machine, made_by, parser
from time_to_loss_report import draw, times

from co2sim import Case, run
from co2sim.catalog import load_cluster
from co2sim.cluster import GPU
from co2sim.schedule import DType
from co2sim.workload import Workload
from realrun.launch.lab import Lab, stated_cluster
from realrun.train import LogRow
from realrun.train.log import read
from realrun.train.shapes import GPTS

LogRows: TypeAlias = tuple[LogRow, ...]

NODES = 4
RATES = ("100 Mbit/s", "1000 Mbit/s")
SIZE = "mini"
BATCH = 32
EVERY = 24
"""Steps between validations: the resolution of "the step at which the loss is reached"."""

_ENOUGH = 1e15
"""A speed, in bytes per second, that adds nothing."""


@dataclass(frozen=True, slots=True)
class Length:
    """Steps of a training, steps between its validations, the model, and on how many nodes."""

    steps: int
    every: int
    size: str = SIZE
    nodes: int = NODES


@dataclass(frozen=True, slots=True)
class Contender:
    """A strategy with what was tuned for it. `line` is its line in convergence.csv."""

    name: str
    strategy: str
    line: str
    lr: float
    outer: str

    @property
    def arguments(self) -> list[str]:
        """For `realrun train`."""
        options = ["--outer", self.outer] if self.outer else []
        return ["-s", self.strategy, "--lr", f"{self.lr:g}", *options]


CONTENDERS = (
    Contender("DDP", "ddp", "AdamW-DDP", 1e-2, ""),
    Contender("DiLoCo, tau 12", "diloco:tau=12", "DiLoCo 12", 5e-3, "momentum=0.5,lr=1"),
    Contender("CO2, tau 12", "co2:tau=12", "CO2 12, ", 1e-2, "momentum=0,lr=0.5,gap=gap_aware"),
)
"""With the learning rates and outer steps to take where convergence.csv has none."""


def contenders(out: Path) -> list[Contender]:
    """What is compared, with the best line of convergence.csv for each."""
    path = out / "convergence.csv"
    if not path.exists():
        return list(CONTENDERS)
    frame = pd.read_csv(path, keep_default_na=False)
    found = []
    for entry in CONTENDERS:
        lines = frame[frame["configuration"].str.startswith(entry.line)].sort_values("loss")
        if len(lines):
            best = lines.iloc[0]
            found.append(replace(entry, lr=float(best["lr"]), outer=str(best["outer"])))
        else:
            found.append(entry)
    return found


def trained(
    arguments: Sequence[str],
    length: Length,
    folder: Path,
    lab: Lab | None,
    *,
    validates: bool = True,
) -> LogRows:
    """Train in a lab, or on this machine's loopback; the rows of the log."""
    evaluations = length.every if validates else 0
    command = ["train", "--size", length.size, "--batch", str(BATCH), "--steps", str(length.steps)]
    command += ["--warmup", str(length.steps // 20), "--eval-every", str(evaluations)]
    command += ["--log-every", str(length.every)]
    command += ["--checkpoint-every", "0", "--evaluate", "after", "--out", str(folder)]
    command += arguments
    realrun = [sys.executable, "-m", "realrun"]
    if lab is None:
        command = [*realrun, *command, "--nproc", str(length.nodes)]
    else:
        inside = ["lab", "run", "--nodes", str(lab.nodes), "--rate", lab.rate, "--", "realrun"]
        command = [*realrun, *inside, *command]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ})
    return read(folder)


def calibrated(lab: Lab, folder: Path, length: Length) -> float:
    """Seconds of a local step in this lab while nothing is sent; the first ones do not count."""
    arguments = ["-s", "local_sgd:tau=10000", "--lr", "0.005"]
    short = replace(length, steps=min(5 * length.every, length.steps))
    rows = trained(arguments, short, folder, lab, validates=False)
    first, last = rows[0], rows[-1]
    return (last.seconds - first.seconds) / (last.step - first.step)


def predicted(entry: Contender, lab: Lab, step: float, folder: Path, size: str) -> float:
    """Seconds of a step, communication included, on a GPU that takes `step` for it alone."""
    path = folder / "stated.toml"
    path.write_text(stated_cluster(lab))
    model, micro_batch = GPTS[size].model(), BATCH // lab.nodes
    job = Workload(model, micro_batch, precision=DType.FP32, recompute="none")
    speed = job.hardware_flops_per_sample * micro_batch / step
    gpu = GPU("calibrated", 1e12, _ENOUGH, {"fp32": speed}, ((1.0, 1.0),))
    cluster = replace(load_cluster(str(path)).value, gpu=gpu, communicators="stream")
    case = Case(
        cluster=cluster,
        model=model,
        strategy=entry.strategy,
        micro_batch=micro_batch,
        precision="fp32",
        recompute="none",
    )
    return run(case).step_time_s


def reached(rows: LogRows, target: float) -> LogRow | None:
    """The first row whose validation loss is as low."""
    low = (row for row in rows if row.validation_loss and row.validation_loss <= target)
    return next(low, None)


def compare(
    chosen: Sequence[Contender], rates: Sequence[str], length: Length, target: float
) -> tuple[pd.DataFrame, dict[tuple[str, str], tuple[LogRows, float]]]:
    """The table, and for the figure the rows and the predicted step by rate and name."""
    lines: list[dict[str, Any]] = []
    curves = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        free = {}
        for entry in chosen:
            free[entry.name] = trained(entry.arguments, length, folder / f"free {entry.name}", None)
            print(f"without a lab: {entry.name} ends at {_last(free[entry.name]):.4f}", flush=True)
        target = target or max(_last(rows) for rows in free.values())
        for rate in rates:
            lab = Lab(length.nodes, 1, rate)
            step = calibrated(lab, folder / f"alone {rate}", length)
            expected = {
                entry.name: predicted(entry, lab, step, folder, length.size) for entry in chosen
            }
            for entry in chosen:  # all of them are predicted by now
                rows = trained(entry.arguments, length, folder / f"{rate} {entry.name}", lab)
                before, after = reached(free[entry.name], target), reached(rows, target)
                line = {
                    "rate": rate,
                    "entry": entry.name,
                    "strategy": entry.strategy,
                    "lr": entry.lr,
                    "outer": entry.outer,
                    "target": target,
                    "local_step_s": step,
                    "steps": before.step if before else None,
                    "predicted_step_s": expected[entry.name],
                    "predicted_s": before.step * expected[entry.name] if before else None,
                    "measured_steps": after.step if after else None,
                    "measured_step_s": rows[-1].seconds / rows[-1].step,
                    "measured_s": after.seconds if after else None,
                    "waited_s": rows[-1].waited,
                }
                lines.append(line)
                curves[rate, entry.name] = (rows, expected[entry.name])
                print(f"{rate}: {entry.name}: {_words(line)}", flush=True)
    return pd.DataFrame(lines), curves


def _last(rows: LogRows) -> float:
    found = [row.validation_loss for row in rows if row.validation_loss is not None]
    return found[-1]


def _words(line: dict[str, Any]) -> str:
    if line["predicted_s"] is None or line["measured_s"] is None:
        return "the loss was not reached"
    error = line["predicted_s"] / line["measured_s"] - 1
    return f"predicted {line['predicted_s']:.1f} s, measured {line['measured_s']:.1f}, {error:+.1%}"


def report(frame: pd.DataFrame, length: Length) -> str:
    """The table in Markdown, and what it is about."""
    return f"""\
# Time to a loss in the lab

A GPT of {GPTS[length.size].parameters:,} parameters, {length.nodes} nodes of one rank, {BATCH} x\
 {GPTS[length.size].context} characters a step, at most {length.steps} steps. The loss to reach is\
 {frame["target"].iloc[0]:.4f} nats per character, the worst that one of them ends with; validated\
 every {length.every} steps. Predicted before: steps from a run without a lab, a local step from a\
 calibration in a lab where nothing is sent, communication by co2sim from the stated rate.\
 {machine()}

{times(frame)}

{made_by()}
"""


def main() -> None:
    """Predict, run, compare."""
    command = parser(__doc__, "CO2 only, the smallest model on two nodes, 24 steps, one rate")
    command.add_argument("--steps", type=int, default=768)
    command.add_argument("--target", type=float, default=0.0, help="the loss to reach")
    given = command.parse_args()
    length, rates, chosen = Length(given.steps, EVERY), RATES, contenders(RESULTS)
    if given.quick:
        length, rates, chosen = Length(24, 12, "tiny", 2), RATES[:1], chosen[-1:]
    frame, curves = compare(chosen, rates, length, given.target)
    words = report(frame, length)
    with folder(given) as out:
        frame.to_csv(out / "time_to_loss.csv", index=False)
        (out / "time_to_loss.md").write_text(words)
        (out / "time_to_loss.png").write_bytes(draw(frame, curves, rates))
    print(words)


if __name__ == "__main__":
    main()
