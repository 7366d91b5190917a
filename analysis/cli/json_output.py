"""JSON as commands print it."""

from typing import Any

import typer


def print_json(value: dict[str, Any]) -> None:
    """Print valid JSON, with null for what is no finite number."""
    from pydantic_core import to_json  # noqa: PLC0415 - only for this option

    typer.echo(to_json(value, indent=2, inf_nan_mode="null").decode())
