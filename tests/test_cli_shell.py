"""The command line as a process: pipes, signals, closed outputs, and what it imports."""

import csv
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.main import get_command

from co2sim.cli.app import COMMANDS, app
from co2sim.console import entry

SMALL = ("-c", "dgx-h100", "-m", "gpt2-small", "-g", "16")


def test_the_installed_command_answers_and_refuses() -> None:
    """From a shell: --version and --help exit 0, a wrong command exits 2."""
    command = [sys.executable, "-m", "co2sim"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.strip()
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "scale" in helped.stdout
    wrong = subprocess.run([*command, "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2


SIZES = ",".join(str(gpus) for gpus in range(8, 8192, 8))
SLOW = (*SMALL[:4], "-s", "zero3", "--jitter", "0.05")


STUDY = """
import signal, sys
from co2sim import batch
from co2sim.cli import main
run, done = batch.run, []
def three(case):
    if len(done) == 3:
        print("three are done", flush=True)
        signal.pause()
    done.append(case)
    return run(case)
batch.run = three
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
        assert study.stdout
        assert study.stdout.readline()
        study.send_signal(number)
        said = study.communicate(timeout=60)[1].splitlines()
    assert study.returncode == 128 + number
    assert (len(said), said[0].split(";")[0]) == (1, word)
    rows = csv.DictReader((tmp_path / "s.csv").read_text().splitlines())
    assert [row["gpus"] for row in rows] == ["8", "16", "24"]


@pytest.mark.slow
def test_the_processes_of_a_study_end_with_it(tmp_path: Path) -> None:
    """Also where it is killed, and cannot tell them: soon, not after minutes without work."""
    command = [sys.executable, "-m", "co2sim", "sweep", "--jobs", "2", *SLOW]
    with subprocess.Popen([*command, "--vary", f"gpus={SIZES}"], cwd=tmp_path) as study:
        children: list[psutil.Process] = []
        limit = time.monotonic() + 60
        while time.monotonic() < limit and sum(map(_simulates, children)) < 2:
            time.sleep(0.1)
            children = psutil.Process(study.pid).children(recursive=True)
        time.sleep(3)  # they are at work
        study.kill()
        study.wait()
    assert psutil.wait_procs(children, 30)[1] == []


def _simulates(process: psutil.Process) -> bool:
    try:
        return any("LokyProcess" in word for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.mark.parametrize("program", ["co2sim", "realrun", "analysis"])
def test_control_c_while_a_command_is_imported_is_one_line(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its first line has run: 130."""
    imported = entry.import_module

    def interrupted(name: str) -> Any:
        if name == f"{program}.cli.app":
            raise KeyboardInterrupt
        return imported(name)

    monkeypatch.setattr(entry, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        import_module(f"{program}.cli").main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.startswith("interrupted; ")


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        ("--help", "numpy pydantic rich simpy co2sim.case co2sim.cli.simulating"),
        ("run -c dgx-h100 -m gpt2-small -s ddp", "scipy matplotlib dask co2sim.published_cells"),
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
heavy = set("{heavy} torch pandas joblib altair jinja2 co2sim.cli.varying".split())
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "[]"


def test_the_list_of_commands_says_what_each_does_on_a_line() -> None:
    """Every command that the list names is there, and no line is cut at 80 columns."""
    group = get_command(app)
    assert len(group.commands) == len(COMMANDS) > 10
    for name, command in group.commands.items():
        line = COMMANDS[name][1]
        assert (command.name, len(line) < 68, line[-1]) == (name, True, ".")
        assert command.help


BOUND = (
    *("bound", "--smoothness", "1", "--noise", "1", "--gap", "1"),
    *("--workers", "2", "--rounds", "9", "--local-steps", "2"),
)
MODULES = ("co2sim", "realrun", "analysis")


NIGHTLY = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["co2sim", *(pytest.param(m, marks=NIGHTLY) for m in MODULES[1:])]
)
def test_a_closed_output_is_one_line_and_exit_code_2(module: str) -> None:
    """With `>&-` a command says on one line that it cannot write, and ends with 2."""
    script = f"exec {sys.executable} -m {module} --help >&-"
    ran = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "closed" in ran.stderr


@pytest.mark.slow
def test_closed_errors_are_no_reason_to_fail() -> None:
    """With `2>&-` a message has no place to go; the exit code still says what happened."""
    script = f"exec {sys.executable} -m co2sim list nothing 2>&-"
    ran = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["co2sim", "run", *SMALL, "-s", "ddp", "--json"],
        *(pytest.param([module, "--help"], marks=NIGHTLY) for module in MODULES),
        pytest.param(["analysis", *BOUND], marks=NIGHTLY),
    ],
)
def test_a_reader_that_has_gone_is_no_error(arguments: list[str]) -> None:
    """`| head -1` ends every command with 0 and without a word, whatever prints."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", *arguments],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_an_ascii_terminal_shows_names_as_escapes(tmp_path: Path) -> None:
    """A name with an umlaut is printed with its code where the terminal knows only ASCII."""
    text = (Path(__file__).parent.parent / "examples/my-cluster.toml").read_text()
    text = text.replace('name = "4 nodes', 'name = "Köln, 4 nodes')
    (tmp_path / "köln.toml").write_text(text, "utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "co2sim", "list", "köln.toml"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert r"K\xf6ln" in ran.stdout


def inside(monkeypatch: pytest.MonkeyPatch, module: str, *arguments: str) -> int:
    """The exit code of a command of one of our packages, run in this process."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(SystemExit) as ended:
        import_module(f"{module}.cli").main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("module", MODULES)
def test_dash_h_is_help(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-h` prints what `--help` prints, for a command and for what it contains."""
    inner = {"co2sim": "run", "realrun": "lab", "analysis": "bound"}[module]
    for path in ([], [inner]):
        shown = []
        for flag in ("-h", "--help"):
            assert inside(monkeypatch, module, *path, flag) == 0
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1]
        assert shown[0].startswith("Usage: ")


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["analysis", *BOUND, "--noise", "2"], "--noise"),
        (["realrun", "run", "-m", "tiny-5m", "-m", "gpt2-xl", "-s", "ddp"], "--model"),
        (["realrun", "lab", "run", "--nodes", "2", "--nodes", "4", "--", "true"], "--nodes"),
    ],
)
def test_every_command_refuses_a_single_option_given_twice(
    arguments: list[str],
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In all three commands, and in groups of commands, nothing is dropped without a word."""
    assert inside(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{flag} is given 2 times" in err
