"""How a command line starts and ends: every error is one line on stderr."""

import io
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command, get_command_from_info
from typer.models import CommandInfo

from co2sim.common.errors import Co2simError, OptionError, error_line

_CONTROL_C = 130
"""The exit code of a shell for a process that it ended."""


_STRATEGY = ", such as -s fsdp; `co2sim plan` tries all"


class _Command(TyperCommand):
    """A command that refuses an option that takes one value and is given several.

    Of required options it names all that are missing, not only the first.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        order = self.make_parser(ctx).parse_args(args=list(args))[2]
        for option, times in Counter(order).items():
            if isinstance(option, TyperOption) and times > 1 and not option.multiple:
                flag = max(option.opts, key=len)
                kind = "give it once" if option.is_flag else "it takes one value"
                if any(other.name == "over" for other in self.get_params(ctx)):
                    kind += f' (several: --vary {flag.removeprefix("--")}="ONE; OTHER")'
                raise OptionError(f"{flag} is given {times} times; {kind}")
        options = [param for param in self.get_params(ctx) if isinstance(param, TyperOption)]
        missing = [max(o.opts, key=len) for o in options if o.required and o not in order]
        if missing and not any(option.is_eager for option in order):  # such as --help
            raise OptionError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
                + (_STRATEGY if "--strategy" in missing else "")
            )
        return super().parse_args(ctx, args)


class _Loaded(Mapping[str, Any]):
    """Commands by name, each made of its function when it is asked for."""

    def __init__(self, package: str, modules: Mapping[str, str]) -> None:
        self._package, self._modules = package, modules

    def __getitem__(self, name: str) -> Any:
        module = import_module(f"{self._package}.{self._modules[name]}")
        function = getattr(module, name, None) or getattr(module, f"{name}_")
        info = CommandInfo(name, cls=_Command, callback=function)
        return get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def commands_of(package: str, table: Mapping[str, tuple[str, str]]) -> type[TyperGroup]:
    """A group of commands, each in the function of its name in a module of `package`.

    `table` gives the module and one line of help of every command. Only the module of a command
    that is asked for is imported.
    """

    class Commands(TyperGroup):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            modules = {name: module for name, (module, _) in table.items()}
            self.commands = _Loaded(package, modules)  # type: ignore[assignment]  # only read

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            del ctx
            with formatter.section("Commands"):
                formatter.write_dl([(name, line) for name, (_, line) in table.items()])

    return Commands


@contextmanager
def keeping(what: str) -> Iterator[None]:
    """Let a control-C say what is on the disk, unless it says so already."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(str(interrupt) or what) from None


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


def run_app(module: str, kept: str = "nothing was written", *, sigterm: bool = True) -> None:
    """Run a command of the `app` of a module. Bad input ends it with one line and exit code 2.

    `kept` says what is on the disk after control-C (130), unless the interrupt does. With `sigterm`
    SIGTERM interrupts as control-C does (143). A reader that has gone, such as `head`, is no error:
    the exit code is 0.
    """
    _set_up_streams()
    code, terminated = 0, False

    def terminate(_number: int, _frame: object) -> NoReturn:
        nonlocal terminated
        terminated = True
        raise Terminated

    before = signal.getsignal(signal.SIGTERM)
    if sigterm and before == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminate)
    try:
        app = import_module(module).app
        _refuse_repeated(app)
        _run(app)
        sys.stdout.flush()
    except typer.Exit as ended:
        code = ended.exit_code
    except (Co2simError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print(error_line(message), file=sys.stderr)
        code = 2
    except (typer.Abort, KeyboardInterrupt) as interrupt:
        code, kept = _CONTROL_C, str(interrupt) or kept
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # the output is full, or gone
        print(error_line(f"cannot write the output: {error.strerror}"), file=sys.stderr)
        code = 2
    finally:
        signal.signal(signal.SIGTERM, before)
    if code == _CONTROL_C:  # what ends well by a signal, such as a server, has nothing to say
        code, word = (143, "terminated") if terminated else (code, "interrupted")
        print(f"{word}; {kept}", file=sys.stderr)
    sys.exit(code)


def _run(app: typer.Typer) -> None:
    """Run the command that the arguments name.

    `app(...)` would do the same, but end with 1 where the reader of a pipe has gone.
    """
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    command = get_command(app)
    with command.make_context(name, sys.argv[1:], help_option_names=["-h", "--help"]) as context:
        command.invoke(context)


def _set_up_streams() -> None:
    """Refuse a closed output; escape what the terminal has no characters for."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
    if sys.stdout is None:
        print("error: cannot write the output: the standard output is closed", file=sys.stderr)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _refuse_repeated(app: typer.Typer) -> None:
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        if group.typer_instance:
            _refuse_repeated(group.typer_instance)


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        help="Print the version.",
        is_eager=True,
        callback=lambda wanted: _print_version() if wanted else None,
    ),
]


def _print_version() -> None:
    from co2sim.common.version import own_version  # noqa: PLC0415 - 30 ms, only when asked for

    print(own_version())
    raise typer.Exit


_WHO = ("--jobs", "--engine", "--scheduler")
"""Who computes, and how many, changes nothing of what they find."""


def command_line(program: str) -> str:
    """What a page names as its command, for a shell: without those, which change no page."""
    words = iter(sys.argv[1:])
    kept = [program]
    for word in words:
        if word in _WHO:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in _WHO)):
            kept.append(word)
    return shlex.join(kept)


def refuse_twice(what: str, names: Iterable[str]) -> None:
    """Raise OptionError for what is given twice."""
    repeated = [name for name, times in Counter(names).items() if times > 1]
    if repeated:
        raise OptionError(f"{what} {repeated[0]} is given twice")


def print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print valid JSON, with null for what is no finite number."""
    from pydantic_core import to_json  # noqa: PLC0415 - only for this option

    typer.echo(to_json(value, indent=2, inf_nan_mode="null").decode())
