"""The options of a lab, for every command that builds one."""

from typing import Annotated

import typer

from co2sim.cli import options

Nodes = Annotated[
    int,
    typer.Option(parser=options.whole("--nodes"), metavar="N", help="Nodes: one namespace each."),
]
GpusPerNode = Annotated[
    int,
    typer.Option(
        parser=options.whole("--gpus-per-node"), metavar="N", help="Ranks that share a node."
    ),
]
Rate = Annotated[
    str, typer.Option(metavar="RATE", help="What each node sends at most, such as '1 Gbit/s'.")
]
Sites = Annotated[
    int,
    typer.Option(
        parser=options.whole("--sites"), metavar="N", help="Sites that share the nodes, in order."
    ),
]
Wan = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="What each site sends to others at most, such as '50 Mbit/s'."
    ),
]
Dilation = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        help="Run everything N times slower than stated, and clocks, too: times are those of the"
        " cluster that the lab stands for. auto: as cores need it where kernels sleep, else 1.",
    ),
]
IntraRate = Annotated[
    str, typer.Option(metavar="RATE", help="What each rank sends at most inside its node.")
]
