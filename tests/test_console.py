"""What commands print and draw: header, delay by slower ranks, what would fit, memory, figures."""

import json
import re
from collections.abc import Callable

import matplotlib as mpl
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from co2sim import Case
from co2sim.console.figures import COLOURS, STYLE, render
from co2sim.console.result_tables import alternatives
from co2sim.study import run
from co2sim.units import scaled

Run = Callable[..., tuple[int, str, str]]
SMALL = ("-c", "dgx-h100", "-m", "gpt2-small")


@pytest.mark.slow
def test_the_header_counts_in_words(cli: Run) -> None:
    """One node is a node; the name of the cluster stands on a line of its own."""
    one = cli("run", *SMALL, "-s", "ddp", "-g", "8")[1].splitlines()
    assert one[0] == "ddp on 8 GPUs in 1 node"
    assert one[1].startswith("cluster  8 DGX H100")
    two = cli("run", *SMALL, "-s", "ddp", "-g", "16")[1].splitlines()
    assert two[0] == "ddp on 16 GPUs in 2 nodes"


def test_the_header_names_speeds_and_the_figures_what_they_cost(cli: Run) -> None:
    """A slow node, stragglers and jitter are in the header; their delay is among the figures."""
    quiet = cli("run", *SMALL, "-s", "ddp", "-g", "16")[1]
    assert "speeds" not in quiet
    assert "slower ranks" not in quiet
    noisy = ("run", *SMALL, "-s", "ddp", "-g", "16", "--node-speed", "1=0.5", "--seed", "3")
    shown = cli(*noisy, "--straggle", "0.1", "--jitter", "0.05", "--rounds", "2")[1]
    assert "node 1 at 0.5 of nominal" in shown
    slow, fast = re.findall(r"all nodes from ([\d.]+) to ([\d.]+) of nominal", shown)[0]
    assert float(slow) < 0.8 < float(fast)
    assert "(straggle 0.1, seed 3)" in shown
    assert "jitter 0.05 on every op (seed 3)" in shown
    assert "delay by slower ranks, per round" in shown


def test_many_node_speeds_do_not_fill_the_header(cli: Run) -> None:
    """Four are named, the others counted."""
    speeds = [text for node in range(6) for text in ("--node-speed", f"{node}=0.9")]
    shown = cli("run", *SMALL, "-s", "ddp", *speeds)[1]
    assert "node 3 at 0.9 of nominal, 2 more nodes" in " ".join(shown.split())


def test_several_strategies_are_printed_one_after_the_other(cli: Run) -> None:
    """`run` takes several; --json gives an object for one, and a list for several."""
    shown = cli("run", *SMALL, "-s", "zero3", "-s", "ddp", "-g", "8")[1]
    assert shown.index("zero3 on 8 GPUs") < shown.index("ddp on 8 GPUs")
    found = json.loads(cli("run", *SMALL, "-s", "zero3", "-s", "ddp", "-g", "8", "--json")[1])
    assert [result["strategy"] for result in found] == ["zero3", "ddp"]


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        (("-m", "llama-13b", "-s", "co2:tau=4"), ["co2:tau=4,worker=node,inner=zero3"]),
        (
            ("-m", "llama-7b", "-s", "zero2", "-g", "16", "--micro-batch", "16"),
            ["--recompute full", "--micro-batch 4"],
        ),
        (("-m", "llama-70b", "-s", "zero3", "-g", "8", "--recompute", "full"), ["--gpus 16"]),
    ],
)
def test_what_would_fit_does_fit_with_the_numbers_that_were_said(
    cli: Run, options: tuple[str, ...], offered: list[str]
) -> None:
    """Every line of "what would fit" is options; run with them, the memory is as it said."""
    shown = cli("run", "-c", "dgx-h100", *options)[1]
    lines = shown.partition("what would fit in 84.9 GB\n")[2].splitlines()[1:]
    offers = dict(re.split(r" {2,}", line) for line in lines if line)
    for instead in offered:
        assert any(instead in text for text in offers)
    for text, size in offers.items():
        given = list(options)
        changes = text.split()
        for flag, value in zip(changes[::2], changes[1::2], strict=True):
            short = {"--strategy": "-s", "--gpus": "-g"}.get(flag, flag)
            if short in given:
                given[given.index(short) + 1] = value
            else:
                given += [flag, value]
        found = json.loads(cli("run", "-c", "dgx-h100", *given, "--json")[1])
        assert found["fits_in_memory"]
        assert float(size.split()[0]) == pytest.approx(
            found["memory_bytes_per_gpu"]["total"] / 1e9, rel=0.01
        )


def test_no_offer_changes_something_in_vain(cli: Run) -> None:
    """Where full recomputation is enough alone, no line combines it with anything."""
    options = ("-m", "llama-7b", "-s", "zero2", "-g", "16", "--micro-batch", "16")
    shown = cli("run", "-c", "dgx-h100", *options)[1].partition("what would fit")[2]
    assert re.search(r"^--recompute full  ", shown, re.MULTILINE)
    assert shown.count("--recompute") == 1


def test_where_nothing_fits_the_smallest_is_named(cli: Run) -> None:
    """70 billion parameters on GPUs of 16 GB: the table says so, and how near one comes."""
    shown = cli("run", "-c", "cloud-25g", "-m", "llama-70b", "-s", "zero2", "-g", "1")[1]
    assert "nothing tried fits" in shown
    assert "co2sim plan" in shown
    assert "--strategy zero3 --recompute full --gpus 64" in shown


def test_alternatives_keep_a_global_batch_possible() -> None:
    """A smaller micro-batch keeps the number of GPUs and the samples of a step."""
    case = Case(cluster="dgx-h100", model="llama-7b", strategy="zero2", gpus=16, micro_batch=8)
    prepared = case.prepare()
    for one in alternatives(prepared, prepared.strategy):
        assert 1 <= int(one.changes.get("micro-batch", 8)) <= 8
        assert one.memory > 0
    assert run(case).fits_in_memory is False


@pytest.mark.slow
def test_one_assumption_is_one_line(cli: Run) -> None:
    """A sweep over micro-batches says once that passes are smaller than any that is known."""
    shown = cli(
        "sweep", *SMALL, "-g", "8", "-s", "ddp", "--vary", "micro_batch=1,2,4,8", "--jobs", "1"
    )[1]
    assert shown.count("cluster.gpu.efficiency") == 1
    assert "cases like it" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "name", "less"),
    [
        (("-s", "zero3"), "activations", "--recompute full"),
        (("-s", "ddp", "--recompute", "full"), "optimizer", "shards it"),
        (("-s", "co2:tau=4,staleness=2", "--recompute", "full"), "outer", "worker=node"),
        (("-s", "zero3", "-m", "llama-70b", "--recompute", "full"), "optimizer", "more GPUs"),
    ],
)
def test_the_largest_item_is_named_with_what_makes_it_smaller(
    cli: Run, options: tuple[str, ...], name: str, less: str
) -> None:
    """What a user has chosen already, or what would not help, is not offered."""
    model = () if "-m" in options else ("-m", "llama-7b")
    given = ("-c", "dgx-h100", *model, "-g", "8", "--micro-batch", "16", *options)
    shown = " ".join(cli("run", *given)[1].split())
    items = json.loads(cli("run", *given, "--json")[1])["memory_bytes_per_gpu"]
    assert items[name] == max(size for item, size in items.items() if item != "total")
    said = shown.partition(f"largest item is {name}, {scaled(items[name], 'B')}: ")[2]
    assert less in said[:100]


def test_memory_says_what_pytorch_counts(cli: Run) -> None:
    """Items that it allocates, their sum, and what is beside them; the same in JSON."""
    options = (*SMALL, "-s", "zero3", "-g", "8")
    shown = cli("run", *options)[1].partition("memory per GPU: ")[2]
    found = json.loads(cli("run", *options, "--json")[1])
    memory, counted = found["memory_bytes_per_gpu"], found["allocated_bytes_per_gpu"]
    beside = sum(memory[name] for name in ("nccl", "context", "fragmentation"))
    assert counted + beside == pytest.approx(memory["total"])
    order = ["logits", "max_memory_allocated", "fragmentation", "nccl", "context", "total"]
    assert [shown.index(name) for name in order] == sorted(shown.index(name) for name in order)
    assert f"  {scaled(counted, 'B')}" in shown


def test_selective_recomputation_with_flash_attention_is_said_to_repeat_nothing(cli: Run) -> None:
    """It is the same as none, and one line says so."""
    options = (*SMALL, "-s", "ddp", "-g", "8")
    shown = cli("run", *options, "--recompute", "selective")[1]
    assert shown.count("repeats nothing") == 1
    one, other = (
        json.loads(cli("run", *options, "--recompute", how, "--json")[1])
        for how in ("none", "selective")
    )
    assert other.pop("notes")
    assert not one.pop("notes")
    assert one == other


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


def test_colours_differ_in_lightness_or_hue() -> None:
    """No two of the palette are alike in all three channels."""
    found = [to_rgb(colour) for colour in COLOURS]
    for place, one in enumerate(found):
        for other in found[:place]:
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.15
