"""Ranks that are forked from a launcher, which has loaded PyTorch for all of them.

Each rank that is started as a program needs two to four seconds of a core to load it. A fork needs
none, and what was loaded lies in memory once. CUDA and ROCm do not survive a fork once anything has
asked for a GPU, so ranks are forked only where PyTorch is built without them, and on Linux.
"""

import ctypes
import io
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TextIO

from co2sim.units import parse
from realrun.dilation import dilation
from realrun.errors import LaunchError
from realrun.launch.membership import LIFE
from realrun.launch.namespaces import NodePlace

OURS = (sys.executable, "-m", "realrun")
"""How a command of ours begins."""

_SET_DEATH_SIGNAL, _SET_NAME = 1, 15
"""Of Linux's prctl."""

_STANDARD_ERROR = 2

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a launcher has handlers for, see `signals`."""

TRAINING = (
    "realrun.cli.train_elastic",
    "realrun.train.elastic_loop",
    "realrun.train.loop",
    "torch._dynamo",  # which the first step of an optimizer loads
)
"""What every rank of a training loads sooner or later."""

_RANKS = ("realrun.cli.ranks", "realrun.execute.executor", "realrun.measure")
_NEEDED = {"probe": (*_RANKS, "realrun.probe.measurement"), "run": _RANKS, "train": TRAINING}
"""The same of ranks of every command."""


def needed(command: Sequence[str]) -> tuple[str, ...] | None:
    """The modules that ranks of this command of ours load; None if it is none of ours."""
    if tuple(command[: len(OURS)]) != OURS or len(command) == len(OURS):
        return None
    return _NEEDED.get(command[len(OURS)], ())


def load(modules: Sequence[str] | None) -> bool:
    """Load what ranks need, if they can be forked here, and say whether they can.

    None: they cannot. Raises ModuleNotFoundError without PyTorch.
    """
    if sys.platform != "linux" or modules is None:
        return False
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as for the ranks
    if import_module("torch").backends.cuda.is_built():
        return False
    for name in modules:
        import_module(name)
    parse("1 GB/s", "B/s")  # which makes the table of units
    return True


def forked(
    command: Sequence[str],
    environment: Mapping[str, str],
    place: NodePlace,
    *,
    output: int | None = None,
    errors: int | None = None,
) -> subprocess.Popen[bytes]:
    """As `processes.started`, but the rank is forked from this process, which has loaded all.

    The command is this Python with a script or a module. The process has not computed with PyTorch:
    threads of OpenMP are lost in a fork.

    It is called "rank0" in lists of processes, in elastic trainings "rank0.1" if it was started
    anew once. Raises LaunchError.
    """
    launcher, name = os.getpid(), f"rank{environment['RANK']}"
    name += f".{environment[LIFE]}" if LIFE in environment else ""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    # Python code runs around this fork, as it does not where a rank is executed: an exception of a
    # signal's handler would be lost in it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        return subprocess.Popen(  # noqa: S603 - nothing is executed
            [name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            restore_signals=False,  # Python has ignored some, as it would do again
            # It never returns. The launcher's other thread, of the store, is none of Python's.
            preexec_fn=lambda: _be_rank(command, environment, place, name, launcher, before),  # noqa: PLW1509
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"cannot fork {name}: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _be_rank(
    command: Sequence[str],
    environment: Mapping[str, str],
    place: NodePlace,
    name: str,
    launcher: int,
    mask: set[int | signal.Signals],
) -> NoReturn:
    """Become what the command would be in this environment. What it raises is no rank's."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != launcher:  # it died before that
        os._exit(1)
    place.enter()
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) > _STANDARD_ERROR:
            with suppress(OSError):  # the list itself was open, too
                os.close(int(path.name))  # the launcher waits until one of them is closed
    for number in _HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            default = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if default else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    torch, threads = import_module("torch"), os.environ.get("OMP_NUM_THREADS")
    os.environ.update(environment)
    if environment["OMP_NUM_THREADS"] != threads:  # else PyTorch has read it
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    torch.seed()  # as it does when it is loaded; else all ranks would draw the same
    dilation.cache_clear()
    libc.prctl(_SET_NAME, name.encode())  # now the launcher watches it, whatever becomes of it
    run_here(command[1:])


def run_here(arguments: Sequence[str]) -> NoReturn:
    """Do what `python ARGUMENTS` would do, a script or "-m" and a module, and end this process."""
    module = arguments[0] == "-m"
    program, *rest = arguments[module:]
    sys.argv = [program, *rest]
    sys.path.insert(0, str(Path.cwd() if module else Path(program).resolve().parent))
    sys.stdout, sys.stderr = _written_at_once(sys.stdout, 1), _written_at_once(sys.stderr, 2)
    code: object = 1
    try:
        if module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        code = 1
    os._exit(code or 0)


def _written_at_once(stream: TextIO | None, number: int) -> io.TextIOWrapper:
    """This stream without a buffer: the last words of a rank that is killed count."""
    raw = io.FileIO(number, "w", closefd=False)
    encoding, errors = (stream.encoding, stream.errors) if stream else (None, None)
    return io.TextIOWrapper(raw, encoding, errors, write_through=True)
