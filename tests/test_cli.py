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


def test_run_json_holds_every_promised_figure(cli: Run) -> None:
    """And memory by item sums to its total."""
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
    assert "cluster.interference" in out.partition("assumed")[2]


def test_run_says_how_many_steps_a_round_has(cli: Run) -> None:
    """Where it has more than one."""
    for strategy, steps in (("local_sgd:tau=2", True), ("ddp", False)):
        assert ("(2 steps)" in cli("run", *SMALL, "-s", strategy)[1]) == steps


def test_assumptions_that_differ_in_their_reasons_are_counted(cli: Run) -> None:
    """Passes of two sizes are assumed for two reasons: one is shown, and one like it counted."""
    given = ("sweep", "-c", "a100-tcp80", "-m", "gpt2-small", "-s", "ddp", "-g", "8")
    _, out, _ = cli(*given, "--vary", "micro_batch=1,2", "--jobs", "1")
    assert re.findall(r"(\d+) cases? like it", " ".join(out.split())) == ["1"]


def test_the_precision_defaults_to_what_the_gpu_trains_in(cli: Run) -> None:
    """bf16 where the GPU has it, else fp16: a V100 has none."""
    for cluster, precision in (("dgx2-ib1", "fp16"), ("dgx-h100", "bf16")):
        out = cli("run", "-c", cluster, "-m", "gpt2-small", "-s", "ddp", "--json")[1]
        assert json.loads(out)["precision"] == precision


def test_a_model_that_does_not_fit_is_reported_not_refused(cli: Run) -> None:
    """DDP of a 70B model does not fit in 80 GB; the command says so and succeeds."""
    given = ("run", "-c", "dgx-h100", "-m", "llama-70b", "-s", "ddp")
    code, out, _ = cli(*given, "--json")
    assert (code, json.loads(out)["fits_in_memory"]) == (0, False)
    code, out, _ = cli(*given)
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


def test_list_shows_names_numbers_and_sources(cli: Run) -> None:
    """`list` works for kinds and for entries."""
    for what, word in (
        ("clusters", "a100-tcp80"),
        ("strategies", "co2"),
        ("a100-tcp80", "80 Gbit/s"),
        ("resnet-50", "ResNet-50"),
    ):
        code, out, _ = cli("list", what)
        assert code == 0
        assert word in out


def test_the_list_shows_the_ranges_that_a_strategy_has(cli: Run) -> None:
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


@pytest.mark.parametrize(("name", "columns"), [("co2", 40), ("diloco", 80)])
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
    assert (code, err.count("\n")) == (2, 1)
    assert "UTF-8" in err


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
