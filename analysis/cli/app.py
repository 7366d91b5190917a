"""The commands of `co2analysis`."""

import typer

from analysis.cli import convergence, measured, published
from co2sim.common.cli import Version

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=(
        "Check what co2sim predicts: beside measured runs (compare, lab, gpu), beside published"
        " results (validate, runs, figures, goodput, whole,"
        " fabric), and by theory (bound, tau,"
        " trends, verify)."
    ),
)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, _version: Version = False) -> None:  # noqa: FBT002
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command("compare")(measured.compare)
app.command("lab", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    measured.lab
)
app.command("gpu")(measured.gpu)
app.command("validate")(published.validate_command)
app.command("runs")(published.runs)
app.command("figures")(published.figures)
app.command("goodput")(published.goodput)
app.command("whole")(published.whole)
app.command("fabric")(published.fabric)
app.command("bound")(convergence.bound)
app.command("tau")(convergence.tau)
app.command("trends")(convergence.trends)
app.command("verify")(convergence.verify)
