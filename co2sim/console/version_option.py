"""The option --version of every program."""

from typing import Annotated

import typer

Version = Annotated[
    bool,
    typer.Option(
        "--version",
        help="Print the version.",
        is_eager=True,
        callback=lambda given: _print_version() if given else None,
    ),
]


def _print_version() -> None:
    from co2sim.own_version import own_version  # noqa: PLC0415 - 30 ms, only where somebody asks

    print(own_version())
    raise typer.Exit
