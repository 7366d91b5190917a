"""Options of the commands that compare strategies over numbers of GPUs."""

from pathlib import Path
from typing import Annotated

import typer

Clusters = Annotated[
    list[str],
    typer.Option("--cluster", "-c", help="Catalog name or TOML file. Repeatable: one panel each."),
]
ManyStrategies = Annotated[
    list[str], typer.Option("--strategy", "-s", help="As in `run`. Repeatable: one line each.")
]
Counts = Annotated[
    str | None,
    typer.Option(
        "--gpus", "-g", help="Counts, such as 8,16,32; default: one node, doubled up to all."
    ),
]
Varied = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        help="A number of the cluster, the model or the batch, and its values: --vary"
        ' inter.bandwidth="25 Gbit/s, 100 Gbit/s". A panel for each. Repeatable: all combinations.',
    ),
]
Published = Annotated[
    Path | None,
    typer.Option(help="Published cells to compare with the prediction (papers/*/results.toml)."),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE.html", help="Write one HTML page, too, with all data inside."
    ),
]
