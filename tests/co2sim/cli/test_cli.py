"""The command line: what `list` and `run` print."""

import json
import re
from collections.abc import Callable

from co2sim.common.errors import OptionError
from co2sim.strategies import STRATEGIES, parse, strategy_options

Run = Callable[..., tuple[int, str, str]]
SMALL = ("-c", "dgx-h100", "-m", "gpt2-small", "-g", "16")


def test_run_json_holds_every_promised_figure(cli: Run) -> None:
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


def test_a_model_that_does_not_fit_is_reported_not_refused(cli: Run) -> None:
    """DDP of a 70B model does not fit in 80 GB; the command says so, and what it assumed."""
    given = ("run", "-c", "dgx-h100", "-m", "llama-70b", "-s", "ddp")
    code, out, _ = cli(*given, "--json")
    assert (code, json.loads(out)["fits_in_memory"]) == (0, False)
    code, out, _ = cli(*given)
    assert (code, "DOES NOT FIT" in out) == (0, True)
    assert "cluster.interference" in out.partition("assumed")[2]


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
