"""First screens of `run`, `scale` and `sweep`: short, whole, and with what a buyer decides by."""

import re
import shlex

import pytest
from commands import Command
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from rich.cells import cell_len

from co2sim.cli import scale
from co2sim.report.text.answer import LACKS, labels
from co2sim.report.text.screen import LINES, WIDTH

BIG = "-c dgx-h100 -m llama3-8b -g 128"
PRICED = "--set price_per_gpu=h100-median-2026-05"
LONG = "co2.published:tau=48,worker=node,inner=zero2,dtype=bf16,average=leader"
STUDY = (
    f"-m transnormer-7b -c a100-tcp80 -c a100-roce800 -s {LONG} -s zeropp -s ddp"
    " -s zero2:owners=true,bucket=8388608 --micro-batch 1 --recompute none -g 8,16,32,64,128"
)
COMMANDS = {
    "one": f"run {BIG} -s fsdp --tokens 2T",
    "without tokens": f"run {BIG} -s fsdp",
    "a price": f"run {BIG} -s fsdp --tokens 2T {PRICED}",
    "three": f"run {BIG} -s fsdp -s fsdp:shard=node -s co2:tau=48,worker=node --tokens 1T",
    "three without tokens": f"run {BIG} -s zero1 -s zero3 -s co2:tau=48,worker=node",
    "twelve": f"run {BIG} -s ddp "
    + " ".join(f"-s diloco:tau={tau},worker=node" for tau in range(10, 120, 10)),
    "what does not fit": "run -c dgx-h100 -m llama-70b -s ddp -g 64 --tokens 1T",
    "what fits nowhere": "run -c dgx-h100 -m llama3-405b -s ddp -s zero1 -g 8",
    "what-if": f"run {BIG} -s zero3 --tokens 1T",
    "experts": "run -c gb200-nvl72 -m qwen3-30b-a3b -s zero1 --ep 8 -g 64 --precision fp8"
    " --stack megatron-core --tokens 1T",
    "stages": "run -c dgx-h100 -m llama3-70b -s fsdp -g 128 --tp 8 --pp 4 --tokens 1T",
    "images": "run -c dgx-h100 -m vit-b16 -s ddp -g 16 --tokens 1B",
    "local updates": f"run {BIG} -s co2:tau=48,worker=node --tokens 1T {PRICED}",
    "sites": "run -c two-sites-wan -m gpt2-xl -s diloco:tau=100,worker=site -g 64 --tokens 1e11",
    "adapters": "run -c dgx-h100 -m llama3-8b -s fsdp -g 8 --lora 16 --tokens 100M",
    "uneven": "run -c dgx-h100 -m gpt2-small -s ddp -g 16 --node-speed 1=0.5 --jitter 0.05",
    "failures": f"run {BIG} -s fsdp --tokens 2T --set failures=meta-rsc-1",
    "the loss of ddp": f"run {BIG} -s ddp -s diloco:tau=50,worker=node --to-loss-steps 1000",
    "a study": f"scale {STUDY} --tokens 1e11",
    "a study without tokens": f"scale {STUDY.replace('8,16,32,64', '8')}",
    "a study with a price": f"scale {STUDY.replace('8,16,32,64', '8')} --tokens 1e11"
    " --set price_per_gpu=a100-80-aws-2026-11",
    "one strategy": "scale -c dgx-h100 -m llama3-8b -s fsdp -g 8,16,32,64 --tokens 1T",
    "bandwidths": "sweep -c dgx-h100 -m gpt2-xl -s zero2 -g 64 --tokens 1e11 --jobs 1"
    f' --vary inter.bandwidth="25 Gbit/s, 100 Gbit/s, 400 Gbit/s" {PRICED}',
    "many cases": "sweep -c dgx-h100 -m gpt2-small -s ddp --vary gpus=8,16,32,64"
    " --vary micro_batch=1,2,4,8 --jobs 1",
    "two currencies": "sweep -c dgx-h100 -m gpt2-small -s ddp -g 8 --tokens 1B --jobs 1"
    ' --vary price_per_gpu="2 USD/h, 2 EUR/h"',
}
VERDICTS = ("fits", "tight", "may not fit", "does not fit")


SIZES = [*((name, 100) for name in COMMANDS), ("three", 80), ("bandwidths", 80), ("a study", 200)]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No picture: `scale` then says how to get one."""
    monkeypatch.setattr(scale, "installed", lambda: False)


@pytest.mark.parametrize(("name", "columns"), SIZES)
def test_an_answer_is_a_screen_with_days_money_and_a_verdict_on_memory(
    cli: Command, monkeypatch: pytest.MonkeyPatch, name: str, columns: int
) -> None:
    """15 lines of 100 columns, also on wider terminals; on narrower ones as wide as these."""
    monkeypatch.setenv("COLUMNS", str(columns))
    words = shlex.split(COMMANDS[name])
    code, out, err = cli(*words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(cell_len, lines)) <= min(columns, WIDTH)
    assert len(lines) <= LINES or columns < WIDTH
    assert any(verdict in out.lower() for verdict in VERDICTS)
    assert bool(re.search(r"\d (days|h|min) ", " ".join(" ".join(lines[:3]).split()))) == (
        "--tokens" in words
    )
    assert re.search(r"\d (USD|EUR)|price_per_gpu|USD|to loss", " ".join(out.split()))
    assert "--full" in lines[-1] + lines[-2]


def test_the_case_that_the_answer_names_is_in_the_table(cli: Command) -> None:
    """Also where it comes last and the table has no room for all cases."""
    others = (f"-s diloco:tau={tau},worker=node" for tau in range(20, 130, 10))
    out = cli(*shlex.split(f"run {BIG} -s fsdp {' '.join(others)}"))[1]
    lines = out.splitlines()
    assert "case" in lines[-1]
    assert sum(line.startswith("diloco(120,node) ") for line in lines) == 1
    assert lines[0].startswith("Fastest: diloco(120,node),")


def test_the_time_of_a_contract_stands_beside_gpu_hours(cli: Command) -> None:
    """128 GPUs for its 90 days are the money, and not the hours of the training."""
    words = f"run -c {ROOT}/examples/offer-c.toml -m llama3-8b -s fsdp --tokens 2T"
    (cost,) = (line for line in cli(*shlex.split(words))[1].splitlines() if line[:5] == "cost ")
    assert "128 GPUs for 90" in cost


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("what-if", "what-if"),
        ("what-if", "warning"),
        ("local updates", "learning"),
        ("sites", "learning"),
        ("what does not fit", "memory"),
        ("failures", "counted"),
        ("one", "like it"),
    ],
)
def test_what_matters_has_its_line(cli: Command, name: str, row: str) -> None:
    """What the stack has not, warnings, the worth of steps: they are not lost to others."""
    out = cli(*shlex.split(COMMANDS[name]))[1]
    assert sum(line.startswith(f"{row} ") for line in out.splitlines()) == 1


def test_a_case_that_no_published_run_is_near_says_so_first(cli: Command) -> None:
    """Alone, or beside one that some run is near."""
    for more in ("", " -s zero3"):
        out = cli(*shlex.split(COMMANDS["images"] + more))[1]
        assert "No published run" in " ".join("".join(out.splitlines()[:3]).split())


@pytest.mark.parametrize("name", ["a study", "many cases", "three"])
def test_full_begins_with_the_screen_and_names_every_row(
    cli: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All lines of the screen are there, and no table loses the columns that name its rows."""
    monkeypatch.setenv("COLUMNS", "100")
    words = shlex.split(COMMANDS[name])
    short, full = (
        [line.rstrip() for line in cli(*words, *more)[1].splitlines()] for more in ((), ("--full",))
    )
    assert full[:2] == short[:2]
    assert len(full) > 2 * LINES
    labels_ = {"cost", "batch", "counted", "like it"}
    assert labels_ <= {line[:8].rstrip() for line in full}
    heads = [line for line in full[len(short) :] if re.search(r"  (kWh|kg CO2e)", line)]
    named = {"a study": "GPUs", "three": "strategy"}.get(name, "")
    assert all(named in line for line in heads)


@pytest.mark.parametrize("more", ["", "--full", "--json", "--report page.html"])
@pytest.mark.parametrize("name", ["one", "three"])
def test_evidence_comes_with_every_output(cli: Command, name: str, more: str) -> None:
    """The nearest published runs of each strategy."""
    if more.startswith("--report"):
        pytest.importorskip("altair")
    words = shlex.split(f"{COMMANDS[name]} {more}")
    plain, out = cli(*words)[1], cli(*words, "--evidence")[1]
    cases = words.count("-s")
    assert out.count("TorchTitan") - plain.count("TorchTitan") >= cases


TITLES = st.builds(
    lambda name, options: f"{name}({', '.join(f'{k}={v}' for k, v in options.items())})",
    st.sampled_from(["co2", "diloco", "fsdp"]),
    st.dictionaries(
        st.sampled_from(["tau", "worker", "inner", "owners", "delay"]),
        st.sampled_from(["1", "48", "node", "true", "false"]),
        min_size=1,
    ),
)


@given(st.lists(TITLES, min_size=1, max_size=6))
def test_labels_tell_strategies_apart_and_are_no_longer(titles: list[str]) -> None:
    """Each has its own, of the same name."""
    short = labels(titles)
    assert set(short) == set(titles)
    assert len(set(short.values())) == len(short)
    for title, label in short.items():
        assert label.partition("(")[0] == title.partition("(")[0]
        assert len(label) <= len(title) + title.count("false")


def test_what_the_stack_lacks_is_marked_in_tables(cli: Command) -> None:
    """Those strategies alone, with what the mark says; of the same table where one fits nowhere."""
    out = cli(*shlex.split(COMMANDS["three without tokens"]))[1]
    stack = shlex.split(f"run {BIG} -s fsdp -s co2:worker=gpu,inner=ddp")
    rows = [line for line in out.splitlines() if line.startswith(("zero1", "zero3", "co2"))]
    assert all(LACKS in row for row in rows)
    assert sum(LACKS in line for line in out.splitlines()) == len(rows) + 1
    assert LACKS not in cli(*stack)[1]
