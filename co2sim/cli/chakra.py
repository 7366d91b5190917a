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
        found = chakra.write(
            prepared.schedule,
            prepared.cluster,
            out,
            precision=prepared.precision,
            rounds=rounds,
            done=done,
        )
    print(
        f"{counted(found.ranks, 'file')} of {counted(found.nodes, 'node')}"
        f" ({counted(found.rounds, 'round')}) in {out}: {scaled(found.size, 'B')}"
    )
    print(
        f"ASTRA-sim: --workload-configuration={out}/trace"
        f" --comm-group-configuration={out}/comm_group.json"
    )
    if found.unsupported:
        print(f"warning: ASTRA-sim does not simulate {' and '.join(found.unsupported)}")


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
        found = chakra.replay(trace, loaded, precision, done)
    if json_:
        print_json(found.to_dict())
        return
    from co2sim.common.tables import console, print_table  # noqa: PLC0415 - rich

    out = console()
    whose = "" if trace.layout else ", a trace of others: run once"
    out.print(f"{found.schedule} on {counted(found.gpus, 'GPU')} of {found.cluster}{whose}\n")
    steps = f" ({found.steps_per_round} steps)" if found.steps_per_round > 1 else ""
    share = found.exposed_comm_s / found.round_time_s if found.round_time_s else 0.0
    rows = [
        ("round time", duration(found.round_time_s) + steps),
        ("step time", duration(found.step_time_s)),
        ("communication busy, per round", duration(found.comm_busy_s)),
        ("communication exposed, per round", f"{duration(found.exposed_comm_s)} ({share:.1%})"),
        ("sent per GPU and step", scaled(found.wire_bytes_per_gpu_per_step, "B")),
        ("sent per node's NICs and step", scaled(found.nic_bytes_per_node_per_step, "B")),
    ]
    print_table(out, "figures", ("figure", "value"), rows)
    if not found.steady:
        out.print(f"not a steady state: {counted(found.rounds_simulated, 'round')} were run")
    works = [(name, duration(value)) for name, value in found.breakdown_s.items()]
    title = "spans of the last round on one rank, by work (overlapping, waiting included)"
    print_table(out, title, ("work", "time"), works)
