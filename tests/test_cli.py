"""The command line: what it prints and writes, and how it refuses."""

import csv
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from co2sim.cli import main
from co2sim.errors import OptionError
from co2sim.files import write_atomically

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
SMALL = ("-c", "dgx-h100", "-m", "gpt2-small", "-g", "16")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run `co2sim` in an empty folder; gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["co2sim", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-c", "a100-tcp8", "-m", "gpt2-xl", "-s", "ddp"], ["a100-tcp8", "a100-tcp80"]),
        (["run", "-c", "a100-tcp80", "-m", "gpt3-xl", "-s", "ddp"], ["gpt3-xl", "gpt2-xl"]),
        (["run", *SMALL, "-s", "co3"], ["co3", "co2"]),
        (["run", *SMALL, "-s", "co2:taw=3"], ["taw", "tau"]),
        (["run", *SMALL, "-s", "ddp:tau=3"], ["ddp", "tau", "bucket_mib"]),
        (["run", *SMALL, "-s", "co2:inner=zero2"], ["inner", "worker=node"]),
        (["run", *SMALL, "-s", "co2:tau=0"], ["tau is 0", "1 to 10000"]),
        (["run", *SMALL, "-s", "co2:staleness=0"], ["staleness is 0"]),
        (["run", *SMALL, "-s", "co2:tau=1.5"], ["1.5", "whole number"]),
        (["run", *SMALL, "-s", "zeropp:hpz_group=3"], ["hpz_group=3", "8 GPUs"]),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.bandwidth=25 GB"], ["GB", "200 Gbit/s"]),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.bandwidth=25 Gb/s"], ["Gb", "Gbit"]),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.bandwidth=25"], ["25", "no unit"]),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.latency=-1 us"], ["-1 us", "at least 0"]),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.speed=1 us"], ["inter.speed", "bandwidth"]),
        (["run", *SMALL, "-s", "ddp", "--set", "model.layer=4"], ["layer", "layers"]),
        (["run", *SMALL, "-s", "ddp", "--set", "model.seq_len=4096"], ["4096", "1024"]),
        (["run", *SMALL, "-s", "ddp", "--set", "interference"], ["interference", "NAME=VALUE"]),
        (["run", *SMALL, "-s", "ddp", "--micro-batch", "0"], ["micro_batch is 0"]),
        (["run", *SMALL, "-s", "ddp", "--precision", "fp8"], ["fp8", "bf16"]),
        (["run", *SMALL, "-s", "ddp", "--recompute", "all"], ["all", "selective"]),
        (["run", *SMALL, "-s", "ddp", "--global-batch", "100"], ["100", "16 GPUs"]),
        (["run", *SMALL, "-s", "ddp", "--jitter", "-1"], ["jitter is -1"]),
        (["run", *SMALL, "-s", "ddp", "--node-speed", "9=0.5"], ["node 9", "0 to 1"]),
        (["run", *SMALL, "-s", "ddp", "--gpus", "12"], ["12 GPUs", "multiple of 8"]),
        (["run", *SMALL, "-s", "ddp", "--gpus", "many"], ["many", "whole number"]),
        (["run", "-c", "dgx-h100", "-s", "ddp"], ["--model"]),
        (["rum"], ["rum"]),
        (["list", "a100-tcp81"], ["a100-tcp81", "a100-tcp80"]),
        (["scale", *SMALL[:4], "-s", "ddp", "-g", "8,12"], ["12 GPUs"]),
        (["scale", *SMALL[:4], "-s", "ddp", "-g", "8,8"], ["twice"]),
        (["scale", *SMALL[:4], "-s", "ddp", "--published", "none.toml"], ["none.toml"]),
        (["sweep", *SMALL, "-s", "ddp", "--vary", "inter.bandwidth=1 Gbit/s,x"], ["'x'"]),
        (["sweep", *SMALL, "-s", "ddp", "--vary", "micro_batch=1,,2"], ["empty"]),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.bandwidth={x}"], ["{x}"]),
        (["run", *SMALL, "-s", "ddp", "--set", "model.vocab=" + "9" * 400], ["vocab"]),
        (["run", *SMALL, "-s", "ddp", "--micro-batch", "9" * 400], ["micro_batch"]),
        (["run", *SMALL, "-s", "zero2:bucket=1"], ["buckets of 1", "10000"]),
        (["scale", *SMALL[:4], "-s", "co2", "-s", "co2:tau=12"], ["twice"]),
        (["trace", *SMALL, "-s", "ddp", "-o", "trace.txt"], ["trace.txt", ".jsonl"]),
        (["run", "-c", "own.toml", "-m", "gpt2-small", "-s", "ddp"], ["own.toml", "No such file"]),
    ],
)
def test_bad_input_is_one_line_exit_code_2_and_writes_nothing(
    cli: Run, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    """Every wrong input says what was given and what is allowed, in one line on stderr."""
    code, out, err = cli(*arguments)
    assert code == 2
    assert not out
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not list(tmp_path.iterdir())


def test_run_json_holds_every_promised_figure(cli: Run) -> None:
    """`run --json` holds the figures that the issue names, and memory by item sums to its total."""
    code, out, _ = cli("run", *SMALL, "-s", "zero3", "--json")
    found = json.loads(out)
    assert code == 0
    promised = (
        "round_time_s step_time_s tokens_per_s tokens_per_s_per_gpu model_tflops_per_gpu mfu"
        " comm_busy_s exposed_comm_s overlap_ratio wire_bytes_per_gpu_per_step"
        " nic_bytes_per_node_per_step memory_bytes_per_gpu fits_in_memory"
    )
    assert set(promised.split()) <= found.keys()
    memory = found["memory_bytes_per_gpu"]
    assert memory.pop("total") == pytest.approx(sum(memory.values()))
    assert found["tokens_per_s"] == pytest.approx(16 * 1024 / found["step_time_s"])


def test_run_prints_what_was_assumed(cli: Run) -> None:
    """A result repeats the numbers that no source supports."""
    code, out, _ = cli("run", *SMALL, "-s", "ddp")
    assert code == 0
    assert "assumed, not measured or published" in out
    assert "cluster.interference" in out


def test_the_precision_defaults_to_what_the_gpu_trains_in(cli: Run) -> None:
    """bf16 where the GPU has it, else fp16: a V100 has none."""
    for cluster, precision in (("dgx2-ib1", "fp16"), ("dgx-h100", "bf16")):
        out = cli("run", "-c", cluster, "-m", "gpt2-small", "-s", "ddp", "--json")[1]
        assert json.loads(out)["precision"] == precision


def test_a_model_that_does_not_fit_is_reported_not_refused(cli: Run) -> None:
    """DDP of a 70B model does not fit in 80 GB; the command says so and succeeds."""
    code, out, _ = cli("run", "-c", "dgx-h100", "-m", "llama-70b", "-s", "ddp", "--json")
    assert code == 0
    assert json.loads(out)["fits_in_memory"] is False
    code, out, _ = cli("run", "-c", "dgx-h100", "-m", "llama-70b", "-s", "ddp")
    assert code == 0
    assert "DOES NOT FIT" in out


def test_scale_writes_table_and_figures_and_shows_published_cells(cli: Run, tmp_path: Path) -> None:
    """`scale` prints a table, writes CSV, PNG and SVG, and shows published cells with errors."""
    code, out, _ = cli(
        *("scale", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "zero2", "-g", "8,16,128"),
        *("--published", str(ROOT / "papers/co2/results.toml"), "--out", "deep/out"),
    )
    assert code == 0
    folder = tmp_path / "deep/out"
    assert sorted(path.name for path in folder.iterdir()) == ["scale.csv", "scale.png", "scale.svg"]
    rows = list(csv.DictReader((folder / "scale.csv").read_text().splitlines()))
    assert [row["gpus"] for row in rows] == ["8", "16", "128"]
    assert (folder / "scale.png").read_bytes().startswith(b"\x89PNG")
    drawn = (folder / "scale.svg").read_text()
    assert "<svg" in drawn
    assert "mathdefault" not in drawn  # matplotlib's markup of ticks, if it is not rendered
    assert "18,444" in out
    predicted = float(rows[0]["tokens_per_s"])
    assert f"{predicted / 18444 - 1:+.0%}" in out


def test_scale_json_holds_results_and_comparisons(cli: Run) -> None:
    """`scale --json` holds every result, and signed errors of the published cells."""
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


def test_every_published_cell_of_the_study_is_predicted(cli: Run) -> None:
    """Cells of strategies and sizes that the study leaves out are simulated for the comparison."""
    code, out, _ = cli(
        *("scale", "-c", "a100-tcp80", "-m", "transnormer-7b", "-s", "ddp", "-g", "8", "--json"),
        *("--published", str(ROOT / "papers/co2/results.toml")),
    )
    found = json.loads(out)
    assert code == 0
    assert [result["strategy"] for result in found["results"]] == ["ddp"]
    cells = {(c["strategy"], *c["sizes"]) for c in found["published"]}
    assert ("co2(tau=12, worker=node, inner=zero2)", 16, 128) in cells
    assert len(cells) == 7


def test_the_same_command_writes_the_same_bytes(cli: Run, tmp_path: Path) -> None:
    """CSV and SVG of the same study are equal bit for bit, with jitter too."""
    for name in ("one", "two"):
        code, _, _ = cli(
            *("scale", *SMALL[:4], "-s", "ddp", "-g", "8,16", "--jitter", "0.1", "--seed", "7"),
            *("--rounds", "2", "-o", name),
        )
        assert code == 0
    for kind in ("csv", "svg"):
        one, two = (tmp_path / name / f"scale.{kind}" for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


def test_sweep_takes_all_combinations_in_parallel(cli: Run, tmp_path: Path) -> None:
    """Two axes of two values give four rows in order, the same on one process and on two."""
    arguments = ("sweep", *SMALL, "-s", "co2", "--vary", "strategy.tau=1,4")
    arguments += ("--vary", "inter.bandwidth=1 Gbit/s, 10 Gbit/s", "--csv", "sweep.csv", "--json")
    code, out, _ = cli(*arguments, "--jobs", "2")
    assert code == 0
    found = json.loads(out)
    assert [tuple(row["setting"].values()) for row in found] == [
        ("1", "1 Gbit/s"),
        ("1", "10 Gbit/s"),
        ("4", "1 Gbit/s"),
        ("4", "10 Gbit/s"),
    ]
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 5
    assert json.loads(cli(*arguments, "--jobs", "1")[1]) == found


def test_sweep_over_strategies_keeps_commas_in_parentheses(cli: Run) -> None:
    """A strategy with options is one value."""
    strategies = "ddp, co2(tau=4, worker=node), zero3"
    code, out, _ = cli("sweep", *SMALL, "-s", "ddp", "--vary", f"strategy={strategies}", "--json")
    assert code == 0
    names = [row["strategy"] for row in json.loads(out)]
    assert names == ["ddp", "co2(tau=4, worker=node)", "zero3"]


def test_sweep_applies_strategies_before_their_options(cli: Run) -> None:
    """Axes may come in any order: options hold for each strategy, and together."""
    code, out, _ = cli(
        *("sweep", *SMALL, "-s", "co2", "--vary", "strategy.tau=4,8", "--json"),
        *("--vary", "strategy=co2,slowmo", "--vary", "strategy.inner=zero1"),
        *("--vary", "strategy.worker=node"),
    )
    assert code == 0
    assert {row["strategy"] for row in json.loads(out)} == {
        f"{name}(tau={tau}, worker=node, inner=zero1)"
        for name in ("co2", "slowmo")
        for tau in (4, 8)
    }


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ('value = 0\nstrategy = "ddp"', "value 0"),
        ('value = nan\nstrategy = "ddp"', "value nan"),
        ('value = "x"\nstrategy = "ddp"', "no published cells"),
        ('strategy = "ddp"', "no value"),
    ],
)
def test_published_cells_that_are_wrong_are_refused(
    cli: Run, tmp_path: Path, cell: str, word: str
) -> None:
    """A cell needs a positive, finite value."""
    head = '[[cell]]\nquantity = "tokens_per_s"\nwhere = "here"\nuse = "check"\n'
    place = 'cluster = "dgx-h100"\nmodel = "gpt2-small"\ngpus = 16\n'
    (tmp_path / "cells.toml").write_text(head + place + cell)
    code, _, err = cli("scale", *SMALL[:4], "-s", "ddp", "-g", "16", "--published", "cells.toml")
    assert code == 2
    assert word in err


def test_a_pipe_is_not_replaced_by_a_file(cli: Run, tmp_path: Path) -> None:
    """Output goes to regular files only, and through links to what they point to."""
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "real.csv")
    sweep = ("sweep", *SMALL, "-s", "ddp", "--vary", "micro_batch=1", "--csv")
    assert cli(*sweep, "link.csv")[0] == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() != "old"
    assert cli(*sweep, "/dev/null")[0] == 2
    assert Path("/dev/null").is_char_device()


def test_trace_opens_in_perfetto_and_reads_back(cli: Run, tmp_path: Path) -> None:
    """`trace` writes Chrome JSON with named tracks, and JSON Lines with one span a line."""
    assert cli("trace", *SMALL, "-s", "zero3", "-o", "trace.json")[0] == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"compute", "gather", "reduce"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all({"round", "bytes", "work"} <= span["args"].keys() for span in spans)
    assert cli("trace", *SMALL, "-s", "zero3", "-o", "trace.jsonl")[0] == 0
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == len(spans) + 1


def test_show_prints_the_schedule(cli: Run) -> None:
    """`show` prints ops with streams, works and waits."""
    code, out, _ = cli("show", *SMALL, "-s", "co2:tau=2")
    assert code == 0
    assert "all_reduce(displacement: 124439808 fp32) over world" in out
    assert "after average[-1]" in out


@pytest.mark.parametrize("what", ["clusters", "strategies", "co2", "a100-tcp80", "resnet-50"])
def test_list_shows_names_numbers_and_sources(cli: Run, what: str) -> None:
    """`list` works for kinds and for entries."""
    code, out, _ = cli("list", what)
    assert code == 0
    assert len(out.splitlines()) > 3


def test_users_own_files_and_their_neighbours(cli: Run, tmp_path: Path) -> None:
    """A cluster file may name a GPU file beside it, and plain values need no source."""
    shutil.copy(ROOT / "examples/my-gpu.toml", tmp_path)
    text = (ROOT / "examples/my-cluster.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('"a100-40"', '"my-gpu.toml"'))
    code, out, _ = cli("run", "-c", "mine.toml", "-m", "gpt2-xl", "-s", "zero2", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["usd_per_billion_tokens"] > 0
    assert found["gpu_memory_bytes"] == 48e9
    assert "our 48 GB card" not in cli("list", "mine.toml")[1]  # a name is no number
    assert "864 GB/s" in cli("list", "mine.toml")[1]


def test_files_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    """When one of several files cannot be written, none is, and no draft stays behind."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(OptionError, match="taken"):
        write_atomically({tmp_path / "a.csv": b"a", tmp_path / "taken": b"b"})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_installed_command_answers_and_refuses() -> None:
    """From a shell: --version and --help exit 0, a wrong command exits 2."""
    command = [sys.executable, "-m", "co2sim"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.strip()
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "scale" in helped.stdout
    wrong = subprocess.run([*command, "nonsense"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2


def test_control_c_ends_with_130_and_writes_nothing(tmp_path: Path) -> None:
    """A long study that is interrupted says so in one line, and leaves no file."""
    study = ("scale", *SMALL[:4], "-s", "zero3", "-g", "1024,2048", "--jitter", "0.05")
    study += ("--set", "interference=0.1")  # so that ranks do not run in lockstep
    command = [sys.executable, "-m", "co2sim", *study]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "interrupted; nothing was written\n"
    assert not list(tmp_path.iterdir())


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
