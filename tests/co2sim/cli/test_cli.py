"""The command line: what commands print and write, and how they run as processes."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from commands import Command, in_process
from places import ROOT

from co2sim.cli import main, scale
from co2sim.common.errors import OptionError
from co2sim.prediction import driver
from co2sim.prediction.published import RunCell, SpeedComparison
from co2sim.prediction.question import Question
from co2sim.report.charts import chart
from co2sim.report.text.answer import LACKS
from co2sim.strategies import STRATEGIES, parse, strategy_options

SMALL = ("-c", "dgx-h100", "-m", "gpt2-small", "-g", "16")


def test_run_json_holds_every_promised_figure(cli: Command) -> None:
    """By the names that scripts read."""
    code, out, _ = cli("run", *SMALL, "-s", "zero3", "--json")
    found = json.loads(out)
    assert code == 0
    promised = (
        "round_time_s step_time_s tokens_per_s tokens_per_s_per_gpu model_tflops_per_gpu mfu"
        " comm_busy_s exposed_comm_s overlap_ratio wire_bytes_per_gpu_per_step"
        " nic_bytes_per_node_per_step memory_bytes_per_gpu fits_in_memory"
    )
    assert set(promised.split()) <= found.keys()


def test_a_model_that_does_not_fit_is_reported_not_refused(cli: Command) -> None:
    """DDP of a 70B model does not fit in 80 GB; the command says so, and what it assumed."""
    given = ("run", "-c", "dgx-h100", "-m", "llama-70b", "-s", "ddp")
    code, out, _ = cli(*given, "--json")
    assert (code, json.loads(out)["fits_in_memory"]) == (0, False)
    code, out, _ = cli(*given, "--full")
    assert (code, "DOES NOT FIT" in out) == (0, True)
    assert "cluster.interference" in out.partition("assumed")[2]


def test_list_shows_names_numbers_and_sources(cli: Command) -> None:
    """`list` works for kinds and for entries."""
    for what, word in (
        ("clusters", "a100-tcp80"),
        ("strategies", "co2"),
        ("a100-tcp80", "80 Gbit/s"),
        ("resnet-50", "ResNet-50"),
    ):
        code, out, _ = cli("list", what)
        assert (code, word in out) == (0, True)


def test_the_list_shows_the_ranges_that_a_strategy_has(cli: Command) -> None:
    """The least that is shown is allowed; one less, and one more than the most, are not."""
    shown = r"^(\w+) +\S+ +a whole number, (?:(\d+) to (\d+)|at least (\d+))"
    for name in STRATEGIES:
        code, out, _ = cli("list", name)
        assert code == 0
        found = re.findall(shown, out, re.MULTILINE)
        options = strategy_options(STRATEGIES[name])
        assert [option for option, *_ in found] == [o for o, _, kind in options if "whole" in kind]
        for option, low, most, at_least in found:
            least = int(low or at_least)
            assert "must be" not in complaint(f"{name}({option}={least})")
            for value in [least - 1, *([int(most) + 1] if most else [])]:
                assert "must be" in complaint(f"{name}({option}={value})")


def complaint(strategy: str) -> str:
    """What is said of a strategy as a text; nothing where it is allowed."""
    try:
        parse(strategy)
    except OptionError as error:
        return str(error)
    return ""


# --- scale, sweep and all answers -------------------------------------------------------------


@pytest.mark.slow
def test_scale_writes_table_and_figures_and_shows_published_cells(
    cli: Command, tmp_path: Path
) -> None:
    """`scale` prints a table, writes CSV, PNG and SVG, and shows published cells with errors."""
    code, out, _ = cli(
        *("scale", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "zero2", "-g", "8,16,128"),
        *("--published", str(ROOT / "papers/co2/results.toml"), "--out", "deep/out"),
        "--full",
    )
    assert code == 0
    folder = tmp_path / "deep/out"
    assert sorted(path.name for path in folder.iterdir()) == ["scale.csv", "scale.png", "scale.svg"]
    rows = list(csv.DictReader((folder / "scale.csv").read_text().splitlines()))
    assert [row["gpus"] for row in rows] == ["8", "16", "128"]
    assert (folder / "scale.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "scale.svg").read_text()
    predicted = float(rows[0]["tokens_per_s"])
    assert f"{predicted / 18444 - 1:+.0%}" in out


def test_without_altair_scale_has_no_picture(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the table, and names the extra."""
    monkeypatch.setattr(scale, "installed", lambda: False)
    code, out, _ = cli("scale", *SMALL, "-s", "ddp")
    assert code == 0
    assert ".[report]" in out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["scale.csv"]


def test_the_picture_shows_intervals_and_published_cells_and_only_what_fits() -> None:
    """Per GPU, a panel for each cluster, one colour a strategy; a star at the published size."""
    cases = [
        Question(cluster=name, model="gpt2-small", strategy=how, gpus=gpus)
        for name in ("a100-tcp80", "a100-roce800")
        for how in ("ddp", "zero3")
        for gpus in (8, 64)
    ]
    results = [driver.run(case) for case in cases]
    results[0] = replace(results[0], fits_in_memory=False)
    cell = RunCell(
        where="table 1", quantity="tokens_per_s", value=32000.0, use="check",
        cluster="a100-tcp80", model="m", strategy="ddp", gpus=32,
    )  # fmt: skip
    spec = chart(cases, results, [SpeedComparison(cell, 1.0)], "").to_dict()
    first, second = spec["hconcat"]
    marks = [layer["mark"]["type"] for layer in first["layer"]]
    assert marks == ["area", "line", "point", "point"]
    band, line, fits, star = (spec["datasets"][layer["data"]["name"]] for layer in first["layer"])
    assert [row["value"] for row in line] == [r.tokens_per_s_per_gpu for r in results[1:4]]
    assert [row["gpus"] for row in fits] == [64, 8, 64]
    assert star == [{"strategy": "ddp", "gpus": 32, "value": 1000.0}]
    assert first["layer"][-1]["encoding"]["x"]["axis"]["values"] == [8, 32, 64]
    assert band[0]["low"] < band[0]["value"] < band[0]["high"]
    assert band[0]["low"] * 64 == pytest.approx(results[1].tokens_per_s_low)
    assert len(second["layer"]) == 3


def test_scale_json_holds_results_and_comparisons(cli: Command) -> None:
    """Every result; signed errors of published cells, also of what the study leaves out."""
    code, out, _ = cli(
        *("scale", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "zero2", "-g", "16,128"),
        *("--published", str(ROOT / "papers/co2/results.toml"), "--json"),
    )
    found = json.loads(out)
    assert code == 0
    assert [result["gpus"] for result in found["results"]] == [16, 128]
    first, last = (result["tokens_per_s_per_gpu"] for result in found["results"])
    ratio = next(c for c in found["published"] if c["quantity"] == "scalability_ratio")
    assert ratio["predicted"] == pytest.approx(last / first)
    assert ratio["error"] == pytest.approx(last / first / 0.82 - 1)
    cells = {(c["strategy"], *c["sizes"]) for c in found["published"]}
    assert ("co2.published(tau=12, worker=node, inner=zero2)", 16, 128) in cells
    assert len(cells) == 7


def test_sweep_marks_what_does_not_fit(cli: Command) -> None:
    """Rows where some fit; the whole where none does."""
    case = ("sweep", "-c", "a100-tcp80", "-m", "llama-7b", "-g", "8", "--jobs", "1")
    for strategies, said in (("ddp", "none fits"), ("ddp, zero3", "* needs"), ("zero3", "")):
        out = cli(*case, "--vary", f"strategy={strategies}", "--full")[1]
        assert said in out
        assert ("none fits" in out, "* needs" in out) == (strategies == "ddp", said > "")


def test_a_link_stays_where_its_file_is_written(cli: Command, tmp_path: Path) -> None:
    """Output goes through links to what they point to."""
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    sweep = ("sweep", *SMALL, "-s", "ddp", "--vary", "micro_batch=1")
    assert cli(*sweep, "--csv", "link.csv")[0] == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() != "old"


def test_run_has_a_row_for_each_strategy(cli: Command) -> None:
    """The fastest first; --full begins with the same, and has each table once."""
    many = ("-s", "ddp", "-s", "ZeRO3", "-s", "co2.published:tau=4,worker=node,inner=zero1")
    code, out, _ = cli("run", *SMALL, *many)
    assert code == 0
    named = re.compile(rf"(ddp|zero3|co2\.published\(4,node\))( {LACKS})?  ")
    rows = [line for line in out.splitlines() if named.match(line)]
    assert len(rows) == 3
    full = cli("run", *SMALL, *many, "--full")[1]
    assert all(row in full for row in rows)
    assumed = [line for line in full.splitlines() if line.startswith("cluster.interference ")]
    assert len(assumed) == 1
    speeds = [float(row.partition("  ")[2].split()[0].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.parametrize("text", ["1e9", "1B", "0.001T", "1000M"])
def test_tokens_are_given_as_people_write_them(cli: Command, text: str) -> None:
    """All are the same number."""
    code, out, _ = cli("run", *SMALL, "-s", "ddp", "--tokens", text, "--json")
    assert code == 0
    assert json.loads(out)["totals"]["tokens"] == 1e9


QUESTIONS: dict[str, tuple[Callable[[Any], dict[str, Any]], Callable[[Any], str]]] = {
    "run --tokens 1e12": (
        lambda found: found,
        lambda found: f"{1e12 / found['tokens_per_s'] / 86400:.3g} days",
    ),
    "own": (
        lambda found: found["trained"],
        lambda found: f"{found['contract_usd_per_gpu_hour']:.2f} USD a GPU-hour",
    ),
    "fabric --jobs 1": (
        lambda found: found["chosen"]["ddp"],
        lambda found: f"{found['networks'][0]['usd_per_gpu']:,.0f} USD a GPU",
    ),
    "solve inter.bandwidth --micro-batch 32 --global-batch 512": (
        lambda found: found[0]["as_it_is"],
        lambda found: f"at least {str(found[0]['answers'][2]['met'][0]['low'] * 8 / 1e9)[:2]}",
    ),
    "goodput --set failures=meta-rsc-1": (
        lambda found: found[0],
        lambda found: f"{100 * found[0]['useful']:.2f} % of the time is useful",
    ),
    "plan --tokens 1e9": (
        lambda found: found["choice"]["result"],
        lambda found: f"{found['choice']['totals']['days'] * 1440:.3g} min",
    ),
    "sweep --vary micro_batch=1,2 --jobs 1": (
        lambda found: found[0],
        lambda found: f"{max(row['tokens_per_s'] for row in found):,.0f}",
    ),
}
"""What is asked, the result of its JSON, and what the answer in words has of it."""


@pytest.mark.parametrize("command", QUESTIONS, ids=lambda command: command.split()[0])
def test_json_and_words_say_the_question_and_the_same_figures(cli: Command, command: str) -> None:
    """Computed here from the JSON, in the units that people read; samples, precision and stack."""
    words = (*command.split(), *SMALL, "-s", "ddp")
    result_of, shown = QUESTIONS[command]
    printed = cli(*words)[1]
    code, out, _ = cli(*words, "--json")
    assert code == 0
    assert shown(json.loads(out)) in " ".join(printed.split())
    result = result_of(json.loads(out))
    assert result["global_batch"] == 16 * result["micro_batch"] * result["accumulation"] == 512
    assert (result["recompute"], result["precision"]) == ("none", "bf16")
    assert "torchtitan" in result["stack"]


# --- as a process: pipes, signals, closed outputs, and what it imports ------------------------


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
def three(case, **more):
    if len(done) == 3:
        print("three are done", flush=True)
        signal.pause()
    done.append(case)
    return run(case, **more)
run_all.run = three
sys.argv = "co2sim sweep -c dgx-h100 -m gpt2-small -s ddp --vary gpus=8,16,24,32".split()
sys.argv += "--csv s.csv --jobs 1".split()
main()
"""


@pytest.mark.slow
class _Interrupted(ModuleType):
    """A module whose import control-C ends."""

    def __getattr__(self, _: str) -> Any:
        raise KeyboardInterrupt


def test_control_c_while_modules_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before there is a command that could say more."""
    name = "co2sim.common.cli"
    monkeypatch.setitem(sys.modules, name, _Interrupted(name))
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (
        130,
        "interrupted; nothing was written\n",
    )


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
