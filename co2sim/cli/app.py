"""The commands of `co2sim`, by the modules that hold them."""

import typer

from co2sim.common.cli import Version, commands_of

COMMANDS = {
    "list": ("listing", "List the catalog, or every number of one entry with its source."),
    "show": ("simulating", "Print the schedule: what every rank does in one round."),
    "run": ("simulating", "Simulate configurations: times, breakdown, traffic, memory."),
    "trace": ("simulating", "Simulate, and write the timeline of every traced rank."),
    "scale": ("simulating", "Compare strategies over GPU counts: table, CSV and figure."),
    "sweep": ("varying", "Vary any parameter over values, in parallel."),
    "solve": ("deciding", "Find the value of a number that reaches a target."),
    "plan": ("deciding", "Find what to buy, or how to run what there is."),
    "goodput": ("goodput", "Say what part of the time is useful where parts fail."),
    "export": ("exchanging", "Write the schedule as Chakra execution traces."),
    "replay": ("exchanging", "Simulate Chakra execution traces on a cluster."),
    "report": ("reporting", "Compare strategies over GPU counts: one HTML page."),
    "explore": ("exploring", "Play: a page that asks the simulator."),
}
"""The module of every command, and what it does, in one line of a terminal."""

app = typer.Typer(
    cls=commands_of("co2sim.cli", COMMANDS),
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Predict how CO2, ZeRO++, ZeRO, DDP and the local-update family scale on a cluster.",
)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, _version: Version = False) -> None:  # noqa: FBT002
    if context.invoked_subcommand is None:
        print(context.get_help())
