"""The command line as a process: pipes, signals, closed outputs, and what it imports."""

import csv
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from commands import in_process

SMALL = ("-c", "dgx-h100", "-m", "gpt2-small", "-g", "16")


def test_the_installed_command_answers_and_refuses() -> None:
    """From a shell: --version and --help exit 0, a wrong command exits 2."""
    command = [sys.executable, "-m", "co2sim"]
    for argument, said, code in (("--version", ".", 0), ("--help", "scale", 0), ("rum", "", 2)):
        ran = subprocess.run([*command, argument], capture_output=True, text=True, check=False)
        assert (ran.returncode, said in ran.stdout) == (code, True)


STUDY = """
import signal, sys
from co2sim.studies import run_all
from co2sim.cli import main
run, done = run_all.run, []
def three(case):
    if len(done) == 3:
        print("three are done", flush=True)
        signal.pause()
    done.append(case)
    return run(case)
run_all.run = three
sys.argv = "co2sim sweep -c dgx-h100 -m gpt2-small -s ddp --vary gpus=8,16,24,32".split()
sys.argv += "--csv s.csv --jobs 1".split()
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "word"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated")])
def test_control_c_and_sigterm_keep_what_is_done(tmp_path: Path, how: str, word: str) -> None:
    """A study ends with 130 or 143 and one line; its table holds the cases that were done."""
    number = signal.Signals[how]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STUDY], cwd=tmp_path, **pipes) as study:
        assert study.stdout.readline()
        study.send_signal(number)
        said = study.communicate(timeout=600)[1].splitlines()
    assert study.returncode == 128 + number
    assert (len(said), said[0].split(";")[0]) == (1, word)
    rows = csv.DictReader((tmp_path / "s.csv").read_text().splitlines())
    assert [row["gpus"] for row in rows] == ["8", "16", "24"]


@pytest.mark.slow
def test_the_processes_of_a_study_end_with_it(tmp_path: Path) -> None:
    """Also where it is killed, and cannot tell them: soon, not after minutes without work."""
    sizes = ",".join(str(gpus) for gpus in range(8, 8192, 8))
    command = [sys.executable, "-m", "co2sim", "sweep", *SMALL[:4], "-s", "zero3", "--jitter=0.05"]
    command += ["--jobs", "2", "--vary", f"gpus={sizes}"]
    with subprocess.Popen(command, cwd=tmp_path) as study:
        children: list[psutil.Process] = []
        limit = time.monotonic() + 600
        while time.monotonic() < limit and sum(map(_simulates, children)) < 2:
            time.sleep(0.1)
            children = psutil.Process(study.pid).children(recursive=True)
        study.kill()
        study.wait()
    assert psutil.wait_procs(children, 300)[1] == []


def _simulates(process: psutil.Process) -> bool:
    try:
        return any("LokyProcess" in word for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        ("--help", "numpy pydantic rich simpy co2sim.prediction.question co2sim.cli.run"),
        (
            "run -c dgx-h100 -m gpt2-small -s ddp",
            "scipy matplotlib dask co2sim.prediction.published",
        ),
    ],
)
def test_a_short_command_imports_nothing_heavy(arguments: str, heavy: str) -> None:
    """What takes long to import, or other commands need, is not imported."""
    code = f"""
import sys
sys.argv = {["co2sim", *arguments.split()]}
from co2sim.cli import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
heavy = set("{heavy} torch pandas joblib altair jinja2 co2sim.cli.sweep".split())
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("redirected", "said"), [("--help >&-", "closed"), ("list nothing 2>&-", "")]
)
def test_a_command_that_cannot_write_ends_with_2(redirected: str, said: str) -> None:
    """A closed output is one line; closed errors are no reason to fail in another way."""
    script = f"exec {sys.executable} -m co2sim {redirected}"
    ran = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", len(said) > 0)
    assert said in ran.stderr


@pytest.mark.slow
def test_a_reader_that_has_gone_is_no_error() -> None:
    """`| head -1` ends every command with 0 and without a word, whatever prints."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "co2sim", "run", *SMALL, "-s", "ddp", "--json"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("module", "inner"), [("co2sim", "run"), ("realrun", "lab"), ("analysis", "bound")]
)
def test_dash_h_is_help(
    module: str, inner: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-h` prints what `--help` prints, for a command and for what it contains."""
    command = in_process(module, import_module(f"{module}.cli").main, monkeypatch, capsys)
    for path in ([], [inner]):
        short, long = (command(*path, flag) for flag in ("-h", "--help"))
        assert short == long
        assert (long.code, long.out.startswith("Usage: ")) == (0, True)
