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
from realrun.launch.forking import OURS, loaded

pytestmark = pytest.mark.dist  # every test starts a launcher, which loads PyTorch

needs_fork = pytest.mark.skipif(
    not loaded([*OURS, "--help"]), reason="ranks are forked on Linux, by a PyTorch without GPUs"
)

SEE = """
import json, os, resource, signal, sys
import torch

LATER = "TORCHINDUCTOR_CACHE_DIR"  # which torch._dynamo sets, when it is loaded

def see():
    handled = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGXFSZ", "SIGUSR1", "SIGCHLD")
    print(json.dumps({
        "environment": {k: v for k, v in os.environ.items() if k not in {"_", "SHLVL", LATER}},
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
import runpy, signal, sys
from realrun.launch import forking
from realrun.launch.local import run_local
code = sys.argv[2]
forking.runpy.run_module = lambda *_, **__: exec(code, {"__name__": "__main__"})
ours = [*forking.OURS, "train", "--steps", "8"]
command = ours if sys.argv[1] == "fork" else [sys.executable, "-c", code]
sys.exit(run_local(command, 2))
"""
"""A launcher whose ranks run a program of ours, forked or not."""


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


def launched(how: str, code: str, folder: Path | str = ".") -> subprocess.CompletedProcess[str]:
    """What two ranks print, and how they end."""
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, how, textwrap.dedent(code)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@needs_fork
def test_forked_rank_finds_what_another_finds(tmp_path: Path) -> None:
    """Environment, folder, signals, cores, files, threads, seeds: all but its name, and chance."""
    seen: dict[str, dict[str, Any]] = {}
    rest = {}
    for how in ("fork", "start"):
        done = launched(how, SEE + "\nsee()", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        first, *others = (line for line in done.stdout.splitlines() if line[0] != "[")
        seen[how] = json.loads(first)
        del seen[how]["environment"]["MASTER_PORT"]
        rest[how] = others
    for what, found in seen["start"].items():
        assert seen["fork"][what] == found, what
    assert seen["fork"]["files"] == [0, 1, 2]
    assert seen["fork"]["environment"]["RANK"] == "0"
    assert rest["fork"] == ["'rank0'"]


@needs_fork
def test_chance_differs_between_forked_ranks(tmp_path: Path) -> None:
    """Random numbers of Python and PyTorch, where nobody gave a seed, are not the other rank's."""
    code = """
        import os, random, torch
        with open(os.environ["RANK"], "w") as file:
            print(random.random(), torch.rand(1).item(), file=file)
    """
    assert launched("fork", code, tmp_path).returncode == 0
    one, other = ((tmp_path / name).read_text().split() for name in "01")
    assert one[0] != other[0]
    assert one[1] != other[1]


@needs_fork
@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("raise SystemExit", 0, ""),
        ("import sys; print('error: no', file=sys.stderr); sys.exit(2)", 2, "no"),
        ("import sys; sys.exit('no such thing')", 1, "no such thing"),
        ("import sys; print('half', end=''); 1 / 0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", 1, "was killed by SIGINT"),
        ("import os; os.kill(os.getpid(), 15)", 1, "was killed by SIGTERM"),
        ("import os; os.abort()", 1, "was killed by SIGABRT"),
        ("import os; os._exit(7)", 1, "exited with code 7"),
    ],
)
def test_forked_rank_ends_like_another(code: str, exit_code: int, said: str) -> None:
    """The launcher's exit code and words are the same, and the rank's last words are there."""
    fork, start = (launched(how, code) for how in ("fork", "start"))
    assert fork.returncode == start.returncode == exit_code
    assert fork.stdout == start.stdout
    assert said in fork.stderr
    assert _of_launcher(fork) == _of_launcher(start)


def _of_launcher(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What it says itself; which rank was first is chance."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    return [line.replace("rank 1", "rank 0") for line in lines]


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


def test_other_commands_and_other_builds_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own program is started, and a PyTorch that knows GPUs is loaded by every rank."""
    import torch  # noqa: PLC0415 - takes two seconds

    for command in (["python", "train.py"], [sys.executable, "-m", "other"], list(OURS)):
        assert not loaded(command)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert not loaded([*OURS, "run"])
    monkeypatch.setattr(forking.sys, "platform", "darwin")
    assert not loaded([*OURS, "run"])


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
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *command.split(), "--nproc", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    more = json.loads((tmp_path / "1").read_text())
    assert len(more) < 10, more
