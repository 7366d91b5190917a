"""The command line as a process: pipes, signals, closed outputs, and what it imports."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import psutil
import pytest
from commands import cpu_seconds

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


ALONE = ("sweep", "--csv", "s.csv", "--jobs", "1"), "s.csv", "they are in s.csv"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "table", "where", "how"),
    [
        (*ALONE, signal.SIGINT),
        (*ALONE, signal.SIGTERM),
        (("sweep", "--csv", "s.csv", "--jobs", "2"), "s.csv", "they are in s.csv", signal.SIGINT),
        (
            ("scale", "--jobs", "2"),
            "out/scale.csv",
            "those of the study are in out/scale.csv",
            signal.SIGTERM,
        ),
    ],
)
def test_control_c_and_sigterm_keep_what_is_done(
    tmp_path: Path, study: tuple[str, ...], table: str, where: str, how: signal.Signals
) -> None:
    """A study ends with 130 or 143; its table holds the cases that one line says were done."""
    sizes = ("-g", SIZES) if study[0] == "scale" else ("--vary", f"gpus={SIZES}")
    command = [sys.executable, "-m", "co2sim", *study, *SLOW, *sizes]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    ) as process:
        while cpu_seconds(process.pid) < 8:  # after all imports, and some cases
            assert process.poll() is None
            time.sleep(0.05)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does: to the workers, too
        else:
            process.terminate()
        assert process.wait(timeout=30) == 128 + how
        assert process.stderr is not None
        said = process.stderr.read()
    word = "interrupted" if how == signal.SIGINT else "terminated"
    found = re.search(rf"^{word}; (\d+) of 1,023 cases were done; {where}\n\Z", said, re.MULTILINE)
    assert found, said
    before = said[: found.start()].splitlines()  # what long work says where it is no terminal
    assert all(line.startswith("simulating cases: ") for line in before)
    assert len(before) <= 1
    rows = list(csv.DictReader((tmp_path / table).read_text().splitlines()))
    assert 1 <= int(found[1]) == len(rows) < 1023
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)


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
def test_control_c_while_a_command_is_imported_is_one_line(program: str) -> None:
    """Before its first line has run: 130, and no traceback."""
    script = f"""
import sys
class Interrupting:
    def find_spec(self, name, *given):
        if name == "{program}.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from {program}.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted; nothing was written\n")


@pytest.mark.parametrize("program", ["co2sim", "realrun", "analysis"])
def test_an_interrupt_that_an_import_swallows_is_not_lost(program: str) -> None:
    """The command was given up with nothing said, or served on; a second one was a traceback."""
    script = """
import os, signal, sys
class Swallowing:
    def find_spec(self, name, *given):
        if name == "PROGRAM.cli.app":
            for _ in range(2):
                try:
                    os.kill(os.getpid(), signal.%s)
                except BaseException:
                    pass
sys.meta_path.insert(0, Swallowing())
from PROGRAM.cli import main
sys.argv = ["PROGRAM", "--help"]
main()
""".replace("PROGRAM", program)
    for name, code, word in (("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")):
        done = subprocess.run(
            [sys.executable, "-c", script % name], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr == f"{word}; nothing was written\n"


def test_a_signal_that_a_callback_swallows_is_one_line() -> None:
    """Python printed the traceback of what the signal raised there, before the line."""
    script = """
import os, signal, sys, weakref
class Calling:
    def find_spec(self, name, *given):
        if name == "co2sim.cli.app":
            one = type("One", (), {})()
            kept = weakref.ref(one, lambda _: os.kill(os.getpid(), signal.SIGTERM))
            del one
sys.meta_path.insert(0, Calling())
from co2sim.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (143, "terminated; nothing was written\n")


@pytest.mark.parametrize(
    ("how", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_a_signal_while_a_text_is_executed_ends_by_its_own_exit_code(
    tmp_path: Path, how: str, code: int, word: str
) -> None:
    """As a dataclass is made: `python -m` ended by SIGINT then, also where SIGTERM came."""
    script = f"""
import sys
class Making:
    def find_spec(self, name, *given):
        if name == "co2sim.cli.app":
            exec("import os, signal; os.kill(os.getpid(), signal.{how}); [0 for _ in range(9)]")
sys.meta_path.insert(0, Making())
from co2sim.cli import main
main()
"""
    (tmp_path / "command.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "command"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, f"{word}; nothing was written\n")


@pytest.mark.parametrize(
    ("how", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_that_comes_again_and_again_is_one_line(
    how: signal.Signals, code: int, word: str
) -> None:
    """Every millisecond, until the process has ended: as when control-C is held down."""
    script = """
import sys, time
from co2sim import study
from co2sim.cli import main
def busy(*_, **__):
    print("busy", flush=True)
    time.sleep(60)
study.run = busy
sys.argv = "co2sim run -c dgx-h100 -m gpt2-small -s ddp -g 8".split()
main()
"""
    for _ in range(3):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", script], text=True, **pipes) as process:
            assert process.stdout
            assert process.stderr
            assert process.stdout.readline() == "busy\n"
            while process.poll() is None:
                process.send_signal(how)
                time.sleep(0.001)
            assert (process.stderr.read(), process.returncode) == (
                f"{word}; nothing was written\n",
                code,
            )


def test_starting_the_simulator_imports_nothing_heavy() -> None:
    """`co2sim run` imports neither torch, pandas, matplotlib nor joblib (pint may take scipy)."""
    code = (
        "import sys; sys.argv = 'co2sim run -c dgx-h100 -m gpt2-small -s ddp --json'.split()\n"
        "from co2sim.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'joblib'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "[]"


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
