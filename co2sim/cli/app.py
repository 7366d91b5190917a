"""The commands of `co2sim`, by the modules that hold them."""

import typer

from co2sim.common.cli import Version, commands_of

COMMANDS = {
    "list": ("catalog", "List the catalog, or every number of one entry with its source."),
    "model": ("model", "Show the blocks of a model, and write them to a file."),
    "show": ("run", "Print the schedule: what every rank does in one round."),
    "run": ("run", "Simulate configurations: times, breakdown, traffic, memory."),
    "trace": ("run", "Simulate, and write the timeline of every traced rank."),
    "scale": ("scale", "Compare strategies over GPU counts: table, CSV and figure."),
    "sweep": ("sweep", "Vary any parameter over values, in parallel."),
    "solve": ("solve", "Find the value of a number that reaches a target."),
    "plan": ("plan", "Find what to buy, or how to run what there is."),
    "fabric": ("fabric", "Find how cheap a network may be, for each strategy."),
    "own": ("own", "Compare owning a cluster with renting it."),
    "calibrate": ("calibrate", "Fit a software stack of your own to runs that you measured."),
    "goodput": ("goodput", "Say what part of the time is useful where parts fail."),
    "export": ("chakra", "Write the schedule as Chakra execution traces."),
    "replay": ("chakra", "Simulate Chakra execution traces on a cluster."),
    "report": ("scale", "Compare strategies over GPU counts: one HTML page."),
    "explore": ("explore", "Play: a page that asks the simulator."),
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
