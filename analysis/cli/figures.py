"""The command `co2analysis figures`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.cli.json_output import print_json
from analysis.cli.published import Papers
from analysis.published.papers import PAPERS
from co2sim.common.errors import OptionError, nearest
from co2sim.common.files import check_writable, write_atomically
from co2sim.common.progress import progress_bar

if TYPE_CHECKING:
    from analysis.published.figures.paper_figures import ErrorsShown, NotDrawn, PaperFigure

_FORMATS = "pdf,svg,png"


def figures(
    out: Annotated[Path, typer.Option("--out", help="Folder for the files.")],
    format_: Annotated[
        str, typer.Option("--format", metavar="NAMES", help="Kinds of files, with commas between.")
    ] = _FORMATS,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this figure, such as co2-table-3. Repeatable."),
    ] = None,
    papers: Papers = PAPERS,
    json_: Annotated[  # noqa: FBT002
        bool, typer.Option("--json", help="Print what was written, with every value, as JSON.")
    ] = False,
) -> None:
    """Draw figures and tables of the CO2 and ZeRO++ papers, published values beside ours.

    Every file is named after what it mirrors. Values that constants were fitted on are hollow.
    """
    kinds = _kinds(format_)
    check_writable(out)
    from analysis.published.figures.paper_figures import paper_figures  # noqa: PLC0415 - matplotlib

    with progress_bar("predicting published cells", after=1.0) as progress:
        assert progress is not None
        found, left_out = paper_figures(papers, only or (), done=progress)
    files = {figure.mirror.name: figure.files(kinds) for figure in found}
    write_atomically({out / name: made for one in files.values() for name, made in one.items()})
    if json_:
        paths = {name: [str(out / file) for file in one] for name, one in files.items()}
        print_json(
            {
                "figures": [one.to_dict() | {"files": paths[one.mirror.name]} for one in found],
                "not_drawn": [_plain(one) for one in left_out],
            }
        )
        return
    for figure in found:
        _say(figure)
        for name in files[figure.mirror.name]:
            typer.echo(f"  written {out / name}")
    drawn = sum(figure.published for figure in found)
    if not only:
        typer.echo(f"{drawn} of {drawn + len(left_out)} published numbers are drawn")
    for one in left_out:
        typer.echo(f"not drawn: {one.published:g} ({one.name}; {one.where}): {one.reason}")


def _kinds(text: str) -> list[str]:
    """The formats of an option, each once. Raises OptionError for an unknown one."""
    kinds = list(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for kind in kinds:
        if kind not in _FORMATS.split(","):
            raise OptionError(f"--format: {kind!r} is no kind of file; {_known(kind)}")
    return kinds


def _known(kind: str) -> str:
    return nearest(kind, _FORMATS.split(","))


def _say(figure: "PaperFigure") -> None:
    typer.echo(f"{figure.mirror.name}: mirrors {figure.mirror.place}")
    parts = [f"{figure.published} published"]
    for errors, words in (
        (figure.errors("check"), "predicted"),
        (figure.errors("fit"), "fitted on (no predictions)"),
    ):
        if errors.values:
            parts.append(f"{errors.values} {words}{_errors(errors)}")
    if figure.alone:
        parts.append("not predicted: quality of training")
    typer.echo(f"  {'; '.join(parts)}")


def _errors(errors: "ErrorsShown") -> str:
    from analysis.published.formats import signed  # noqa: PLC0415 - numpy, pydantic

    if errors.median is None or errors.largest is None:
        return ""
    return f": error median {signed(errors.median)}, largest {signed(errors.largest)}"


def _plain(one: "NotDrawn") -> dict[str, object]:
    return {
        "where": one.where,
        "cell": one.name,
        "published": one.published,
        "reason": one.reason,
    }
