"""Ranks of our own commands are forked, and find what they would find as programs."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from same_bytes import ROOT

from realrun.launch import forking
from realrun.launch.forking import OURS, load, needed

pytestmark = pytest.mark.dist  # every test starts a launcher, which loads PyTorch

needs_fork = pytest.mark.usefixtures("forks")


@pytest.fixture(scope="module")
def forks() -> None:
    """Skip where ranks are started as programs."""
    pytest.importorskip("torch")
    if not load(()):
        pytest.skip("ranks are forked on Linux, by a PyTorch without GPUs")


SEE = """
import json, os, resource, signal, sys
import torch

def see():
    handled = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGXFSZ", "SIGUSR1", "SIGCHLD")
    print(json.dumps({
        "environment": {k: v for k, v in os.environ.items() if k not in {"_", "SHLVL"}},
        "folder": os.getcwd(),
        "imports from here": not {"", os.getcwd()}.isdisjoint(sys.path),
        "signals": {name: str(signal.getsignal(getattr(signal, name))) for name in handled},
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "cores": sorted(os.sched_getaffinity(0)),
        "files": sorted(int(one) for one in os.listdir("/proc/self/fd"))[:-1],
        "input": os.readlink("/proc/self/fd/0"),
        "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
        "threads": torch.get_num_threads(),
        "encodings": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.encoding,
                      sys.stderr.errors],
        "limits": resource.getrlimit(resource.RLIMIT_CORE),
    }))
    print(repr(open("/proc/self/comm").read().strip()))
"""
"""What a rank finds, as JSON; then what may differ."""

LAUNCH = """
import sys
from realrun.launch import forking
from realrun.launch.local import run_local
for code in sys.argv[2:]:
    forking.runpy.run_module = lambda *_, **__: exec(code, {"__name__": "__main__"})
    ours = [*forking.OURS, "run"]
    command = ours if sys.argv[1] == "fork" else [sys.executable, "-c", code]
    end = run_local(command, 2, loads=forking.needed(command))
    print(f" {end}===", flush=True)
    print("===", file=sys.stderr, flush=True)
"""
"""A launcher whose ranks run programs of ours, forked or not, one after the other."""


COUNT = """
import json, os, runpy, sys
from realrun.cli import main
from realrun.launch import forking
begin, end = runpy.run_module, os._exit

def run_module(*given, **named):
    before = set(sys.modules)

    def exiting(code):
        more = [name for name in set(sys.modules) - before if name.startswith("torch")]
        open(os.environ["RANK"], "w").write(json.dumps(more))
        end(code)

    os._exit = exiting
    begin(*given, **named)

forking.runpy.run_module = run_module
main()
"""
"""A command whose ranks write which modules of PyTorch they load themselves."""


def called(
    code: str, *arguments: str, folder: Path | str = "."
) -> subprocess.CompletedProcess[str]:
    """A Python program, run in a folder."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@needs_fork
def test_forked_rank_finds_what_another_finds(tmp_path: Path) -> None:
    """Environment, folder, signals, cores, files, threads, encodings: all but its name."""
    seen: dict[str, dict[str, Any]] = {}
    names = {}
    for how in ("fork", "start"):
        done = called(LAUNCH, how, SEE + "\nsee()", folder=tmp_path)
        assert done.stderr == "===\n"
        first, name, end = (line for line in done.stdout.splitlines() if line[0] != "[")
        assert end == " 0==="
        seen[how] = json.loads(first)
        del seen[how]["environment"]["MASTER_PORT"]
        names[how] = name
    for what, found in seen["start"].items():
        assert seen["fork"][what] == found, what
    assert seen["fork"]["files"] == [0, 1, 2]
    assert seen["fork"]["environment"]["RANK"] == "0"
    assert names["fork"] == "'rank0'"


@needs_fork
def test_chance_differs_between_forked_ranks(tmp_path: Path) -> None:
    """Random numbers of Python and PyTorch, where nobody gave a seed, are not the other rank's."""
    code = """
        import os, random, torch
        with open(os.environ["RANK"], "w") as file:
            print(random.random(), torch.rand(1).item(), file=file)
    """
    called(LAUNCH, "fork", textwrap.dedent(code), folder=tmp_path)
    one, other = ((tmp_path / name).read_text().split() for name in "01")
    assert one[0] != other[0]
    assert one[1] != other[1]


ENDINGS = {
    "raise SystemExit": (0, ""),
    "import sys; print('error: no', file=sys.stderr); sys.exit(2)": (2, "] error: no"),
    "import sys; sys.exit('no such thing')": (1, "] no such thing"),
    "print('half', end=''); 1 / 0": (1, "] ZeroDivisionError: division by zero"),
    "raise KeyboardInterrupt": (1, "was killed by SIGINT"),
    "import os; os.kill(os.getpid(), 15)": (1, "was killed by SIGTERM"),
    "import os; os.abort()": (1, "was killed by SIGABRT"),
    "import os; os._exit(7)": (1, "exited with code 7"),
}
"""What ranks do; the launcher's exit code, and what it says or passes on."""


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of a launcher, by what its ranks did."""
    done = called(LAUNCH, "fork", *ENDINGS)
    parts = zip(done.stdout.split("==="), done.stderr.split("==="), strict=True)
    found = [(int(out.split()[-1]), out, errors) for out, errors in list(parts)[:-1]]
    return dict(zip(ENDINGS, found, strict=True))


@needs_fork
@pytest.mark.parametrize("code", ENDINGS)
def test_forked_rank_ends_like_a_program(code: str, ends: dict[str, tuple[int, str, str]]) -> None:
    """Exit code and signal are those of Python, and its last words are there."""
    (exit_code, said), (found, out, errors) = ENDINGS[code], ends[code]
    assert found == exit_code
    assert said in errors
    assert bool(errors.strip()) == bool(said)
    assert out.count("half") == 2 * code.count("half")


PLACED = """
import os, sys
from co2sim.errors import Co2simError
from realrun.launch import forking
from realrun.launch.local import rank_environment
from realrun.launch.namespaces import NodePlace
from realrun.launch.processes import start
forking.load(())
forking.runpy.run_module = lambda *_, **__: print(sorted(os.sched_getaffinity(0)))
given = rank_environment(0, 1, local_world_size=1, address="127.0.0.1", port=1)
for place in (NodePlace(cores=(int(sys.argv[1]),)), NodePlace(holder=2**22)):
    try:
        one = start(0, [*forking.OURS, "run"], given, place, fork=True)
        print(one.process.communicate()[0].decode(), end="")
    except Co2simError as error:
        print(error)
"""


@needs_fork
def test_forked_rank_is_where_it_belongs() -> None:
    """On cores of its own; where a node is gone, the launcher says so on one line."""
    core = max(os.sched_getaffinity(0))
    done = called(PLACED, str(core))
    placed, failed = done.stdout.splitlines()
    assert placed == f"[{core}]"
    assert failed.startswith("cannot fork rank0: ")
    assert done.stderr == ""


@needs_fork
def test_forked_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    """However it ends: here it is killed."""
    code = """
        import os, time
        open(f"{os.environ['RANK']}.new", "w").write(str(os.getpid()))
        os.rename(f"{os.environ['RANK']}.new", os.environ["RANK"])
        time.sleep(1000)
    """
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "fork", textwrap.dedent(code)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as launcher:
        until = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in "01"):
            assert time.monotonic() < until
            time.sleep(0.05)
        ranks = [psutil.Process(int((tmp_path / name).read_text())) for name in "01"]
        launcher.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(ranks, timeout=20)[1] == []


@needs_fork
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_still_loads_ends_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """Where ranks are asked before they are killed, too: there is none yet that could be."""
    (tmp_path / "slow.py").write_text("import time; print('loads', flush=True); time.sleep(100)")
    code = """
        import sys
        from realrun.launch.forking import OURS
        from realrun.launch.local import run_local
        sys.exit(run_local([*OURS, "train"], 2, ask_first=True, loads=["slow"]))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "loads\n"
        launcher.send_signal(number)
        assert launcher.wait(20) == 128 + number


def test_other_commands_and_other_builds_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own program is started, and a PyTorch that knows GPUs is loaded by every rank."""
    torch = pytest.importorskip("torch")
    assert needed(["python", "train.py"]) is None
    assert needed([sys.executable, "-m", "other"]) is None
    assert needed(list(OURS)) is None
    assert needed([*OURS, "--help"]) == ()
    assert not load(None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert not load(needed([*OURS, "run"]))
    monkeypatch.setattr(forking.sys, "platform", "darwin")
    assert not load(needed([*OURS, "run"]))


@needs_fork
@pytest.mark.parametrize(
    "command",
    [
        "train --size tiny --steps 2 -s co2:tau=1",
        "train --size tiny --steps 2 -s co2:tau=1 --elastic",
        "run -m gpt2-small -c dgx-h100 -s ddp --kernels sleep --rounds 1",
    ],
)
def test_launcher_has_loaded_what_its_ranks_need(command: str, tmp_path: Path) -> None:
    """A rank loads no more than a handful of modules of PyTorch after it was forked."""
    done = called(COUNT, *command.split(), "--nproc", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    more = json.loads((tmp_path / "1").read_text())
    assert len(more) < 10, more
