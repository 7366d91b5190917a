"""The commands of the lab: a cluster of network namespaces on this machine."""

from typing import Annotated

import typer

from co2sim.cli import options
from co2sim.common import convert
from realrun.lab.lab import Dilation, Lab, run_lab, stated_cluster
from realrun.lab.time_dilation import SLEEPING

lab = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A cluster of network namespaces on this machine (Linux, root), with a known bandwidth.",
)


_lab_options = options.record_options(Lab, "stated")


@lab.command(context_settings={"allow_interspersed_args": False})
@_lab_options
def run(
    stated: Lab,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="What every rank runs, behind --: -- python train.py", metavar="-- COMMAND"
        ),
    ] = None,
    dilation: Dilation = "auto",
    grace: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="How long other ranks may take to stop after one failed."
        ),
    ] = "5 s",
) -> None:
    """Build the lab, run a command as every rank in it, and take it down again.

    Ranks have torchrun's environment; REALRUN_CLUSTER names a file that states this cluster, and
    REALRUN_SITES is the number of sites, if there are several. Threads that communicate come
    before kernels (SCHED_FIFO), as a network card does; REALRUN_REALTIME=0 leaves them as they are.
    """
    time = convert.seconds("--grace", grace)
    built = stated.slower(dilation, command or [])
    raise typer.Exit(run_lab(command or [], built, grace=time))


@lab.command()
@_lab_options
def cluster(stated: Lab, dilation: Dilation = "auto") -> None:
    """Print the lab as a cluster file, to predict with: co2sim run -c lab.toml ..."""
    print(stated_cluster(stated.slower(dilation, SLEEPING)), end="")
