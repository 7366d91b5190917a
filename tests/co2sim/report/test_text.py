"""What commands print and draw: header, delay by slower ranks, what would fit, memory, figures."""

import json
import re

import matplotlib as mpl
import pytest
from commands import Command
from matplotlib.figure import Figure

from co2sim.common.plots import COLOURS, STYLE, render

SMALL = ("-c", "dgx-h100", "-m", "gpt2-small")


def test_the_header_names_speeds_and_the_figures_what_they_cost(cli: Command) -> None:
    """A slow node, stragglers and jitter are in the header; their delay is among the figures."""
    quiet = cli("run", *SMALL, "-s", "ddp", "-g", "16", "--set", "node_spread=0", "--full")[1]
    assert "speeds" not in quiet
    assert "slower ranks" not in quiet
    noisy = ("run", *SMALL, "-s", "ddp", "-g", "16", "--node-speed", "1=0.5", "--seed", "3")
    noisy += ("--straggle", "0.1", "--jitter", "0.05", "--rounds", "2", "--full")
    shown = cli(*noisy)[1]
    assert "node 1 at 0.5 of nominal" in shown
    slow, fast = re.findall(r"all nodes from ([\d.]+) to ([\d.]+) of nominal", shown)[0]
    assert float(slow) < 0.8 < float(fast)
    assert "(straggle 0.1, seed 3)" in shown
    assert "jitter 0.05 on every op (seed 3)" in shown
    assert "delay by slower ranks, per round" in shown


def changed(words: list[str], options: str) -> list[str]:
    """A command with other options, in place of those that it has."""
    made = [*words]
    for name, value in re.findall(r"(--\S+)(?: ([^-]\S*))?", options):
        flag = {"--strategy": "-s", "--gpus": "-g"}.get(name, name)
        if flag in made:
            del made[made.index(flag) : made.index(flag) + 2]
        made += [flag, *[value] * bool(value)]
    return made


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ("-m llama-13b -s co2:tau=4 --micro-batch 1", ["co2:tau=4,worker=node,inner=fsdp"]),
        ("-m llama-7b -s zero2 -g 16 --micro-batch 16", ["--recompute full", "--micro-batch 4"]),
        ("-m llama-70b -s zero3 -g 8 --micro-batch 1 --recompute full", ["--gpus 16"]),
    ],
)
def test_what_would_fit_does_fit_with_the_numbers_that_were_said(
    cli: Command, options: str, offered: list[str]
) -> None:
    """Every line of "what would fit" is options; run with them, the memory is as it said."""
    words = f"run -c dgx-h100 {options} --accumulation 1".split()
    words += [] if "--recompute" in words else ["--recompute", "none"]
    shown = cli(*words, "--full")[1]
    lines = shown.partition("what would fit in 84.9 GB (")[2].partition("\n\n")[0].splitlines()[2:]
    offers = dict(re.split(r" {2,}", line.strip())[:2] for line in lines if line)
    for instead in offered:
        assert any(instead in text for text in offers)
    for text, size in offers.items():
        found = json.loads(cli(*changed(words, text), "--json")[1])
        assert found["fits_in_memory"]
        assert float(size.split()[0]) == pytest.approx(
            found["memory_bytes_per_gpu"]["total"] / 1e9, rel=0.01
        )


@pytest.mark.parametrize(
    "options",
    [
        "-c a100-tcp80 -m gpt2-xl -s ddp -g 16 --stack megatron-core --micro-batch 4",
        "-c dgx-h100 -m llama3-8b -s fsdp -g 16 --recompute none --global-batch 64",
        "-c dgx-h100 -m llama-7b -s co2:delay=auto -g 16 --micro-batch 4 --accumulation 2",
        "-c dgx-h100 -m llama3-70b -s fsdp -g 64 --pp 4 --micro-batch 1 --recompute full",
    ],
)
def test_an_option_saves_what_a_run_with_it_needs_less(cli: Command, options: str) -> None:
    """Every option is tried alone, the best first; run with it, the memory is as it said."""
    words = f"run {options}".split()
    plain = json.loads(cli(*words, "--memory", "--json")[1])
    total, changes = plain["memory_bytes_per_gpu"]["total"], plain["step_memory"]["options"]
    assert changes
    assert [one["saves"] for one in changes] == sorted((c["saves"] for c in changes), reverse=True)
    asked = [*words]
    for name in ("micro_batch", "recompute", "global_batch"):
        flag = f"--{name.replace('_', '-')}"
        if flag not in asked and not (name == "global_batch" and "--accumulation" in asked):
            asked += [flag, str(plain[name])]
    for change in changes:
        found = json.loads(cli(*changed(asked, change["option"]), "--json")[1])
        needed = found["memory_bytes_per_gpu"]["total"]
        assert needed == pytest.approx(change["total"], rel=1e-9)
        assert total - needed == pytest.approx(change["saves"], rel=1e-6)
        assert change["saves"] > 0
        assert change["memory_fit"] == found["memory_fit"]


@pytest.mark.parametrize("more", ["-s fsdp", "-s ddp --recompute full", "-s fsdp --pp 4 --tp 2"])
def test_the_peak_of_a_step_is_what_the_answer_says(cli: Command, more: str) -> None:
    """The items of the fullest moment are those of the result; no other moment holds more."""
    words = f"run -c dgx-h100 -m llama3-8b -g 16 {more} --memory --json".split()
    found = json.loads(cli(*words)[1])
    step = found["step_memory"]
    assert step["peak_items"] == pytest.approx(found["memory_bytes_per_gpu"])
    totals = [sum(sizes) for sizes in zip(*step["items"].values(), strict=True)]
    assert max(totals) == pytest.approx(found["allocated_bytes_per_gpu"])
    assert max(totals) == totals[step["moments"].index(step["peak"])]
    for held in step["milestones"].values():
        assert any(size == pytest.approx(held) for size in totals)


def test_memory_shows_every_item_moment_and_option_of_the_json(cli: Command) -> None:
    """Beside the first screen, which is the same as without it."""
    words = ["run", "-c", "dgx-h100", "-m", "llama3-8b", "-s", "fsdp", "-g", "16"]
    plain, shown = cli(*words)[1], cli(*words, "--memory")[1]
    assert shown.startswith(plain)
    step = json.loads(cli(*words, "--memory", "--json")[1])["step_memory"]
    for name in (*step["peak_items"], *step["milestones"], *(o["option"] for o in step["options"])):
        assert name in shown


def test_no_option_is_offered_that_the_stack_lacks(cli: Command) -> None:
    """PyTorch's FSDP in torchtitan has no optimizer states on the host; Megatron's ddp has."""
    offered = {}
    for stack in ("torchtitan", "megatron-core"):
        words = f"run -c dgx-h100 -m llama3-8b -s ddp -g 16 --stack {stack} --memory --json".split()
        options = json.loads(cli(*words)[1])["step_memory"]["options"]
        offered[stack] = {option["option"] for option in options}
    host = {"--offload optimizer", "--offload activations"}
    assert offered["megatron-core"] - offered["torchtitan"] >= host


def test_four_bits_are_offered_for_frozen_weights_alone(cli: Command) -> None:
    """With adapters, whose base is not in four bits yet."""
    for more, expected in (
        ("", False),
        ("--lora 8", True),
        ("--lora 8 --quantize-base nf4", False),
    ):
        words = f"run -c dgx-h100 -m llama3-8b -s ddp -g 8 {more} --memory --json".split()
        options = json.loads(cli(*words)[1])["step_memory"]["options"]
        assert ("--quantize-base nf4" in {option["option"] for option in options}) == expected


# --- figures ------------------------------------------------------------------------------------


def drawn(kind: str) -> bytes:
    """A small figure with a text in every colour."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(2.0, 2.0))
        axis = figure.subplots()
        for place, colour in enumerate(COLOURS):
            axis.plot([0, 1], [place, place], color=colour, label=f"line {place}")
        axis.legend()
        return render(figure, kind)


@pytest.mark.parametrize(
    ("kind", "start", "date"),
    [
        ("png", b"\x89PNG", b"tIME"),
        ("svg", b"<?xml", b"dc:date"),
        ("pdf", b"%PDF", b"Date"),
    ],
)
def test_a_figure_of_any_kind_is_the_same_file_again(kind: str, start: bytes, date: bytes) -> None:
    """No date, and no random names inside."""
    found = drawn(kind)
    assert found.startswith(start)
    assert found == drawn(kind)
    assert date not in found
