"""Wall-clock to a given loss in the lab: predicted by co2sim before, measured after.

    sudo python benchmarks/time_to_loss.py                # an hour on two quiet cores
    sudo python benchmarks/time_to_loss.py --seeds 2      # two thirds of it
    sudo python benchmarks/time_to_loss.py --quick        # a trial of seconds

torch's DDP and post-local SGD, torchft's LocalSGD and DiLoCo, and our LocalSGD, SlowMo, DiLoCo,
Streaming DiLoCo and CO2, as published and with a delay that it measures, train the same GPT from
the same weights on the same samples, on four nodes at 100 and at 1000 Mbit/s. CO2 with a delay runs
in rounds of 12 steps, as the others, and in the shortest that co2sim finds to be hidden. One launch
of the ranks in a lab runs all of them, one after the other, with one seed after the other.

A local step takes 100 ms, as on a device whose speed is known: the forward and backward pass are
real, and the rest of the time is waited for before anything is sent. Four ranks on two cores would
else wait for each other's arithmetic, which no device of a real cluster does.

What goes into a prediction is known before the run begins:

- how many steps the loss takes: from a run of the same training without a lab, whose seed is the
  same: network and clock do not change what is learned. CO2 that measures its delay is told there
  the one that co2sim chooses;
- the time of a local step: from a calibration in the lab before each seed, in which nothing is sent
  (local_sgd with a tau beyond its end): it holds the optimizer's step, too. Others are of the
  model inside DDP, and of CO2 with a delay whose workers average with nobody: what it does beside
  the steps counts. One in which something is sent all the time tells how much that slows the
  steps down: ranks send with the cores that they compute with. One with an average after each step
  tells what the network attains of its stated rate: a core that comes late loses it. torchft's
  LocalSGD averages every tensor by itself: what the cores need for so many messages is found with
  tensors of hardly any bytes. Cores and network work at the same time, so that the slower counts;
- all communication: from the rate at which the lab is built, and what is attained of it, by
  co2sim. It runs the model of
  `realrun train --describe` on a GPU that takes the calibrated time for a step. Methods of torch
  and torchft have the schedule of the strategy that does the same.

The loss to reach is the worst with which one of the runs without a lab ends, so that all reach it.
CO2 as published is run first: the others end soon after they have reached what it ends with; one
that does not sets the loss. --target gives another. Between two validations the loss is taken to
fall evenly. Learning rates and outer steps are those of convergence.csv, where there is one.
Measured seconds are rank 0's, and count all but validation, which comes after the training. Waits
for averages are those of the rank that waited least.

Each finished run is a row of time_to_loss-runs.csv; what is there is not run again: remove the file
to measure anew. Writes time_to_loss.csv, time_to_loss.md and time_to_loss.png.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from reports import RESULTS, folder, parser
from time_to_loss_plan import FREE, Plan, next_run, read

from realrun.launch.lab import run_lab
from realrun.launch.lab_plan import Lab
from realrun.launch.local import run_local


def main() -> None:
    """Start the ranks, or be one of them; then write what is there."""
    command = parser(__doc__, "two methods, the smallest model on two nodes, 24 steps, one rate")
    usual = Plan()
    command.add_argument("--steps", type=int, default=usual.steps)
    command.add_argument("--seeds", type=int, default=len(usual.seeds), help="how many")
    command.add_argument("--target", type=float, default=0.0, help="the loss to reach")
    command.add_argument("--report", action="store_true", help="run nothing, only write the table")
    command.add_argument("--where", default="", help=argparse.SUPPRESS)  # for the ranks
    given = command.parse_args()
    if given.seeds < 1:
        command.error(f"--seeds is {given.seeds}; it must be at least 1")
    if given.steps < 2 * usual.every or given.steps % usual.every:
        command.error(
            f"--steps is {given.steps}; it must be a multiple of {usual.every}, at least twice it"
        )
    plan = (
        Plan.small()
        if given.quick
        else replace(usual, steps=given.steps, seeds=tuple(range(given.seeds)), target=given.target)
    )
    with folder(given) as out:
        if given.where:
            from time_to_loss_runs import run_ranks  # noqa: PLC0415 - torch, for the ranks alone

            run_ranks(plan, out, RESULTS, given.where)
            return
        code = 0
        for where in (FREE, *plan.rates):
            code = code or (0 if given.report else run_missing(plan, out, where))
        if code:
            sys.exit(code)
        if next_run(plan, read(out), RESULTS, FREE) is not None:
            command.error(f"--report: {out} does not hold all runs without a lab")
        from time_to_loss_report import write  # noqa: PLC0415 - figures, which no rank draws

        write(plan, read(out), out, RESULTS)


def run_missing(plan: Plan, out: Path, where: str) -> int:
    """Start the ranks there until no run is missing; the exit code.

    A run that fails ends them: it is noted, and not repeated.
    """
    ranks = [sys.executable, __file__, *sys.argv[1:], "--out", str(out), "--where", where]
    while next_run(plan, known := read(out), RESULTS, where) is not None:
        if where == FREE:
            code = run_local(ranks, plan.nodes)
        else:
            code = run_lab(ranks, Lab(plan.nodes, 1, where))
        if code > 1 or (code and len(read(out)) == len(known)):
            return code  # control-C, or no run at all
    return 0


if __name__ == "__main__":
    main()
