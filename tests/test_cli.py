"""The command line: what `list`, `run`, `trace` and `show` print, and how all refuse."""

import json
import re
import shutil
from collections.abc import Callable
from inspect import getdoc
from itertools import pairwise
from pathlib import Path

import pytest

from co2sim.errors import OptionError
from co2sim.strategies import STRATEGIES, parse, strategy_options

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent
SMALL = ("-c", "dgx-h100", "-m", "gpt2-small", "-g", "16")


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
        (["run", *SMALL, "-s", "ddp", "--set", "inter.bandwidth=25 gb/s"], ["gb/s", "Gbit"]),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.bandwith=1 Gbit/s"], ["'inter.bandwidth'"]),
        (["run", *SMALL, "-s", "ddp", "--set", "gpu.peek.bf16=1 TFLOP/s"], ["gpu.pe"]),
        (["run", "-c", "", *SMALL[2:], "-s", "ddp"], ["cluster is empty", "co2sim list clusters"]),
        (["run", "-c", ".", *SMALL[2:], "-s", "ddp"], [". is a folder", ".toml"]),
        (["run", "-c", "./", *SMALL[2:], "-s", "ddp"], ["./ is a folder", ".toml"]),
        (["run", *SMALL[:2], "-m", " ", "-s", "ddp"], ["model is empty", "co2sim list models"]),
        (["run", *SMALL, "-g", "8", "-s", "ddp"], ["--gpus is given 2 times", "one value"]),
        (["run", *SMALL, "-s", "ddp", "-s", "ddp:bucket_mib=25"], ["ddp is given twice"]),
        (["run", *SMALL, "-s", "ddp", *["--micro-batch", "1"] * 2], ["--micro-batch is given 2"]),
        (["run", *SMALL, "-s", "ddp", "--json", "--json"], ["--json is given 2", "give it once"]),
        (["run", *SMALL, "-s", "ddp", "--fold", "--no-fold"], ["--fold is given 2 times"]),
        (["show", *SMALL, "-s", "ddp", "-s", "zero3"], ["--strategy is given 2 times"]),
        (["sweep", *SMALL, "-c", "a100-tcp80", "-s", "ddp"], ["--cluster is given 2 times"]),
        (["sweep", *SMALL, "-s", "ddp", "--vary", "gpus=16,24"], ["--gpus", "--vary gpus"]),
        (
            ["sweep", *SMALL, "-s", "ddp", "--micro-batch", "1", "--vary", "micro_batch=1,2"],
            ["--micro-batch is given, and --vary micro_batch"],
        ),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.bandwidth=25"], ["25", "no unit"]),
        (["run", *SMALL, "-s", "ddp", "--set", "inter.latency=-1 us"], ["-1 us", "at least 0"]),
        (
            ["run", *SMALL, "-s", "ddp", "--set", "inter.bandwith=1 us"],
            ["inter.bandwith", "bandwidth"],
        ),
        (["run", *SMALL, "-s", "ddp", "--set", "model.layer=4"], ["layer", "layers"]),
        (["run", *SMALL, "-s", "ddp", "--set", "model.seq_len=4096"], ["4096", "1024"]),
        (["run", *SMALL, "-s", "ddp", "--set", "interference"], ["interference", "NAME=VALUE"]),
        (["run", *SMALL, "-s", "ddp", "--micro-batch", "0"], ["micro_batch is 0"]),
        (["run", *SMALL, "-s", "ddp", "--precision", "fp8"], ["has no fp8 in our catalog", "bf16"]),
        (["run", *SMALL, "-s", "ddp", "--recompute", "all"], ["all", "selective"]),
        (["run", *SMALL, "-s", "ddp", "--global-batch", "100"], ["100", "16 GPUs"]),
        (["run", *SMALL, "-s", "ddp", "--jitter", "-1"], ["jitter is -1"]),
        (["run", *SMALL, "-s", "ddp", "--node-speed", "9=0.5"], ["node 9", "0 to 1"]),
        (["run", *SMALL[:4], "-s", "ddp", "--gpus", "12"], ["12 GPUs", "multiple of 8"]),
        (["run", *SMALL[:4], "-s", "ddp", "--gpus", "many"], ["many", "whole number"]),
        (["run", "-c", "dgx-h100", "-s", "ddp"], ["--model is missing"]),
        (["scale", "-s", "ddp"], ["--model, --cluster are missing"]),
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


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_the_list_shows_the_ranges_that_a_strategy_has(cli: Run, name: str) -> None:
    """The least that is shown is allowed; one less, and one more than the most, are not."""
    code, out, _ = cli("list", name)
    assert code == 0
    shown = r"^(\w+) +\S+ +a whole number, (?:(\d+) to (\d+)|at least (\d+))"
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


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", ["co2", "zero3", "diloco"])
def test_a_text_of_the_list_fills_its_lines(
    cli: Run, monkeypatch: pytest.MonkeyPatch, name: str, columns: int
) -> None:
    """A line ends where the next word has no room, or with its paragraph; no word is lost."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = cli("list", name)[1].partition("\noptions\n")[0]
    for paragraph in text.strip().split("\n\n"):
        lines = [line.rstrip() for line in paragraph.splitlines()]
        for line, following in pairwise(lines):
            assert len(line) <= columns < len(line) + 1 + len(following.split()[0])
    assert text.split() == f"{name}: {getdoc(STRATEGIES[name])}".split()


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


def test_a_byte_order_mark_is_no_part_of_a_file(cli: Run, tmp_path: Path) -> None:
    """Files saved by some editors of Windows start with one; TOML and JSON read the same."""
    text = (ROOT / "examples/my-cluster.toml").read_text()
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert cli("list", "mine.toml")[1].startswith("mine.toml: 4 nodes of 4 A100")
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    (tmp_path / "gpt2.json").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(config | {"n_positions": 1024}).encode()
    )
    assert "124,439,808" in cli("list", "gpt2.json")[1]


def test_a_file_that_is_no_text_is_refused(cli: Run, tmp_path: Path) -> None:
    """Another encoding than UTF-8 is one line."""
    (tmp_path / "mine.toml").write_bytes("name = 'Köln'".encode("utf-16"))
    code, _, err = cli("list", "mine.toml")
    assert (code, err) == (2, "error: cannot read mine.toml: it is not a text in UTF-8\n")


def test_a_price_in_euros_gives_a_cost_in_euros(cli: Run, tmp_path: Path) -> None:
    """The same number as in dollars, under its own name; nothing is converted."""
    shutil.copy(ROOT / "examples/my-cluster.toml", tmp_path)
    command = ("run", "-c", "my-cluster.toml", "-m", "gpt2-small", "-s", "ddp")
    dollars = json.loads(cli(*command, "--set", "price_per_gpu=2 USD/h", "--json")[1])
    euros = json.loads(cli(*command, "--set", "price_per_gpu=2 EUR/h", "--json")[1])
    assert dollars["usd_per_billion_tokens"] == dollars["cost_per_billion_tokens"]
    assert euros["usd_per_billion_tokens"] is None
    assert euros["cost_per_billion_tokens"] == dollars["cost_per_billion_tokens"]
    assert (dollars["currency"], euros["currency"]) == ("USD", "EUR")
    assert "EUR per billion tokens" in cli(*command, "--set", "price_per_gpu=2 EUR/h")[1]
    code, _, err = cli(*command, "--set", "price_per_gpu=-2 EUR/h")
    assert code == 2
    assert "price_per_gpu: '-2 EUR/h' is below 0" in err


def test_the_help_says_what_recomputation_keeps(cli: Run) -> None:
    """Attention, recomputation and loss are choices of their own, each with what it keeps."""
    shown = " ".join(cli("run", "--help")[1].split())
    for text in ("the scores are never kept", "selective (the scores of eager attention)", "fp32)"):
        assert text in shown
