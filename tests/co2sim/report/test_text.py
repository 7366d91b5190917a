"""What commands print and draw: header, delay by slower ranks, what would fit, memory, figures."""

import json
import re

import matplotlib as mpl
import pytest
from commands import Command
from matplotlib.figure import Figure

from co2sim.common.plots import COLOURS, STYLE, render
from co2sim.common.units import scaled

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


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ("-m llama-13b -s co2:tau=4 --micro-batch 1", ["co2:tau=4,worker=node,inner=zero3"]),
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
        changed = list(words)
        changes = text.split()
        for flag, value in zip(changes[::2], changes[1::2], strict=True):
            short = {"--strategy": "-s", "--gpus": "-g"}.get(flag, flag)
            if short in changed:
                changed[changed.index(short) + 1] = value
            else:
                changed += [flag, value]
        found = json.loads(cli(*changed, "--json")[1])
        assert found["fits_in_memory"]
        assert float(size.split()[0]) == pytest.approx(
            found["memory_bytes_per_gpu"]["total"] / 1e9, rel=0.01
        )


@pytest.mark.parametrize(
    ("options", "name", "less"),
    [
        ("-s zero3 --recompute none", "activations", "--recompute full"),
        ("-s ddp --recompute full", "optimizer", "shards it"),
        ("-s co2.published:tau=4,staleness=2 --recompute full", "outer", "worker=node"),
        ("-s zero3 -m llama-70b --recompute full", "optimizer", "more GPUs"),
    ],
)
def test_the_largest_item_is_named_with_what_makes_it_smaller(
    cli: Command, options: str, name: str, less: str
) -> None:
    """What a user has chosen already, or what would not help, is not offered."""
    model = "" if "-m" in options else "-m llama-7b"
    words = f"run -c dgx-h100 {model} -g 8 --micro-batch 16 --accumulation 1 {options}".split()
    shown = " ".join(cli(*words, "--full")[1].split())
    items = json.loads(cli(*words, "--json")[1])["memory_bytes_per_gpu"]
    assert items[name] == max(size for item, size in items.items() if item != "total")
    said = shown.partition(f"largest item is {name}, {scaled(items[name], 'B')}: ")[2]
    assert less in said[:100]


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
