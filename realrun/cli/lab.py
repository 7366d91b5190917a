"""The commands of the lab: a cluster of network namespaces on this machine."""

from typing import Annotated

import typer

from co2sim.cli import options
from realrun.cli import options as launching
from realrun.cli.options import strategies_in
from realrun.lab.lab import INTRA_RATE, Lab, run_lab, stated_cluster
from realrun.lab.time_dilation import SLEEPING, chosen
from realrun.launch.launcher import Dilation, GpusPerNode, IntraRate, Nodes, Rate, Sites, Wan, cores

lab = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="A cluster of network namespaces on this machine (Linux, root), with a known bandwidth.",
)


@lab.command(context_settings={"allow_interspersed_args": False})
def run(  # noqa: PLR0917 - one argument per option
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="What every rank runs, behind --: -- python train.py", metavar="-- COMMAND"
        ),
    ] = None,
    nodes: Nodes = 4,
    gpus_per_node: GpusPerNode = 1,
    rate: Rate = "1 Gbit/s",
    intra_rate: IntraRate = INTRA_RATE,
    sites: Sites = 1,
    wan: Wan = None,
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
    time = options.seconds("--grace", grace)
    if command and command[:2] == ["realrun", "run"]:
        _refuse_auto(command[2:])
    slower = chosen(dilation, command or [], nodes * gpus_per_node, cores(), sites)
    built = Lab(nodes, gpus_per_node, rate, intra_rate, sites, wan, slower)
    raise typer.Exit(run_lab(command or [], built, grace=time))


def _refuse_auto(words: list[str]) -> None:
    """Raise OptionError before the lab is built, for what its ranks would refuse."""
    own = None
    for place, word in enumerate(words):
        if word in {"-c", "--cluster"}:
            own = next(iter(words[place + 1 :]), None)
        elif word.startswith(("-c", "--cluster=")):
            own = word
    launching.refuse_auto(words, list(strategies_in(words)), cluster=own, ranks=None)


@lab.command()
def cluster(
    nodes: Nodes = 4,
    gpus_per_node: GpusPerNode = 1,
    rate: Rate = "1 Gbit/s",
    intra_rate: IntraRate = INTRA_RATE,
    sites: Sites = 1,
    wan: Wan = None,
    dilation: Dilation = "auto",
) -> None:
    """Print the lab as a cluster file, to predict with: co2sim run -c lab.toml ..."""
    slower = chosen(dilation, SLEEPING, nodes * gpus_per_node, cores(), sites)
    built = Lab(nodes, gpus_per_node, rate, intra_rate, sites, wan, slower)
    print(stated_cluster(built), end="")
