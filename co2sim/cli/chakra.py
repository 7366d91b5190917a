"""The commands that exchange schedules with other simulators: options, and what they print."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from co2sim.catalog import DEFAULT_STACK, load_cluster, load_stack
from co2sim.cli import options
from co2sim.common import convert
from co2sim.common.cli import print_json
from co2sim.common.progress import progress_bar
from co2sim.common.units import counted, duration, scaled
from co2sim.prediction import driver
from co2sim.prediction.question import Question


@options.case_options("place", "job")
def export(
    case: Question,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="A new folder for the files.")
    ] = Path("chakra"),
    rounds: Annotated[
        int | None,
        typer.Option(
            parser=partial(convert.whole, "--rounds"),
            metavar="N",
            help="Rounds to write; default: as many as show every wait, one more than the farthest"
            " goes back.",
        ),
    ] = None,
) -> None:
    """Write the schedule as Chakra execution traces, one file a rank, for ASTRA-sim and others."""
    from co2sim.simulation import chakra  # noqa: PLC0415 - of an extra

    prepared = driver.resolve_auto(case).stage()
    with progress_bar("writing ranks", after=1.0) as done:
        written = chakra.write(
            prepared.schedule,
            prepared.cluster,
            out,
            precision=prepared.precision,
            rounds=rounds,
            done=done,
        )
    print(
        f"{counted(written.ranks, 'file')} of {counted(written.nodes, 'node')}"
        f" ({counted(written.rounds, 'round')}) in {out}: {scaled(written.size, 'B')}"
    )
    print(
        f"ASTRA-sim: --workload-configuration={out}/trace"
        f" --comm-group-configuration={out}/comm_group.json"
    )
    if written.unsupported:
        print(f"warning: ASTRA-sim does not simulate {' and '.join(written.unsupported)}")


def replay(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Of NAME.0.et, NAME.1.et and so on, or FOLDER/NAME of several."
        ),
    ],
    cluster: options.Cluster,
    precision: Annotated[str | None, options.flag("precision")] = None,
    stack: Annotated[str, options.flag("stack")] = "",
    overrides: Annotated[list[str] | None, options.flag("overrides")] = None,
    json_: options.Json = False,  # noqa: FBT002
) -> None:
    """Simulate Chakra execution traces on a cluster: time, communication, traffic."""
    from co2sim.simulation import chakra  # noqa: PLC0415 - of an extra

    loaded = load_cluster(cluster, options.pairs(overrides, "--set")).value
    software = load_stack(stack or loaded.stack or DEFAULT_STACK).value
    loaded = software.within(loaded, options.pairs(overrides, "--set"))
    with progress_bar("reading ranks", after=1.0) as done:
        trace = chakra.read(place, done)
    with progress_bar("simulating rounds", after=1.0) as done:
        figures = chakra.replay(trace, loaded, precision, done)
    if json_:
        print_json(figures.to_dict())
        return
    from co2sim.common.tables import console, print_table  # noqa: PLC0415 - rich

    out = console()
    whose = "" if trace.layout else ", a trace of others: run once"
    out.print(f"{figures.schedule} on {counted(figures.gpus, 'GPU')} of {figures.cluster}{whose}\n")
    steps = f" ({figures.steps_per_round} steps)" if figures.steps_per_round > 1 else ""
    share = figures.exposed_comm_s / figures.round_time_s if figures.round_time_s else 0.0
    rows = [
        ("round time", duration(figures.round_time_s) + steps),
        ("step time", duration(figures.step_time_s)),
        ("communication busy, per round", duration(figures.comm_busy_s)),
        ("communication exposed, per round", f"{duration(figures.exposed_comm_s)} ({share:.1%})"),
        ("sent per GPU and step", scaled(figures.wire_bytes_per_gpu_per_step, "B")),
        ("sent per node's NICs and step", scaled(figures.nic_bytes_per_node_per_step, "B")),
    ]
    print_table(out, "figures", ("figure", "value"), rows)
    if not figures.steady:
        out.print(f"not a steady state: {counted(figures.rounds_simulated, 'round')} were run")
    works = [(name, duration(value)) for name, value in figures.breakdown_s.items()]
    title = "spans of the last round on one rank, by work (overlapping, waiting included)"
    print_table(out, title, ("work", "time"), works)
