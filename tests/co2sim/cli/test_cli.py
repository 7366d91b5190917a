"""The command line: what `list`, `run`, `trace` and `show` print, and how all refuse."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT

from co2sim.common.errors import OptionError
from co2sim.strategies import STRATEGIES, parse, strategy_options

Run = Callable[..., tuple[int, str, str]]
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
    assert found["tokens_per_s"] == pytest.approx(
        found["global_batch"] * 1024 / found["step_time_s"]
    )


def test_a_model_that_does_not_fit_is_reported_not_refused(cli: Run) -> None:
    """DDP of a 70B model does not fit in 80 GB; the command says so, and what it assumed."""
    given = ("run", "-c", "dgx-h100", "-m", "llama-70b", "-s", "ddp")
    code, out, _ = cli(*given, "--json")
    assert (code, json.loads(out)["fits_in_memory"]) == (0, False)
    code, out, _ = cli(*given)
    assert (code, "DOES NOT FIT" in out) == (0, True)
    assert "cluster.interference" in out.partition("assumed")[2]


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


def test_list_shows_names_numbers_and_sources(cli: Run) -> None:
    """`list` works for kinds and for entries."""
    for what, word in (
        ("clusters", "a100-tcp80"),
        ("strategies", "co2"),
        ("a100-tcp80", "80 Gbit/s"),
        ("resnet-50", "ResNet-50"),
    ):
        code, out, _ = cli("list", what)
        assert (code, word in out) == (0, True)


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
