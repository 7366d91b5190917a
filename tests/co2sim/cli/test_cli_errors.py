"""Bad input of every option of `co2sim`: one line on stderr, exit code 2, and nothing written."""

import shlex
from pathlib import Path

import pytest
from commands import OFFER, Command, refused
from typer.core import TyperOption
from typer.main import get_command

from co2sim.cli.app import app

BASE = "-c dgx-h100 -m gpt2-small"
ON = f"{BASE} -s ddp -g 16"

DOLLARS = OFFER.format(name="an offer", price=2, rate=400, nodes=4)
CELL = (
    '[[cell]]\nwhere = "here"\nquantity = "tokens_per_s"\nuse = "check"\ncluster = "dgx-h100"\n'
    'model = "gpt2-small"\nstrategy = "ddp"\ngpus = 16\n'
)
FILES = {
    "offer.toml": DOLLARS,
    "copy.toml": DOLLARS,
    "euro.toml": DOLLARS.replace("an offer", "another").replace("USD", "EUR"),
    "runs.csv": "gpus,tokens_per_s_per_gpu\n8,38000\n",
    "zero.toml": f"{CELL}value = 0\n",
    "valueless.toml": CELL,
    "twice.json": '{"model_type": "gpt2", "extra": {"a": 1, "b": 2, "a": 1}}',
    "empty.toml": " \n",
    "job.toml": 'model = "gpt2-small"\ngpus = 16\n',
    "modle.toml": 'modle = "gpt2-small"\n',
    "gpus.toml": "gpus = 16\n",
    "batch.toml": 'model = "gpt2-small"\ngpus = 16\nmicro_batch = 0\n',
    "nodes.toml": 'model = "gpt2-small"\ngpus = 12\n',
    "overrides.toml": 'model = "gpt2-small"\noverrides = 3\n',
    "dotted.toml": 'model = "gpt2-small"\nfabric.share = 0.5\n',
    "rails.toml": 'model = "gpt2-small"\ngpus = 16\n[overrides]\nfabric.rails = true\n',
    "part.toml": 'model = "gpt2-small"\ngpus = 4\n',
    "odd.toml": 'model = "gpt2-small"\nspeed = 3\n',
}

WORDS = {
    "BASE": BASE,
    "ON": ON,
    "FAILING": f"goodput {ON} --set failures=meta-rsc-1",
    "SOLVE": f"{ON} inter.bandwidth",
    "PLAN": "plan -c offer.toml -m gpt2-small --global-batch 64 -s ddp",
    "EXPLORE": f"explore {BASE} -s ddp -g 16",
    "HUGE": "9" * 400,
    "LONG": "x" * 100_000,
    "MANY": " ".join(f"-s co2.published:tau={tau}" for tau in range(2, 15)),
    "UP_TO_60": ",".join(map(str, range(1, 61))),
    "UP_TO_65": ",".join(map(str, range(1, 66))),
    "LLAMA": "-c dgx-h100 -m llama3-8b -g 16",
    "QWEN": "-c dgx-h100 -m qwen3-30b-a3b -g 16",
    "RESNET": "-c dgx-h100 -m resnet-50 -s ddp -g 16",
    "AS": f"{BASE} -g 16 -s",
}
BAD = refused("co2sim-refused.txt", **WORDS)


@pytest.mark.parametrize(("line", "token"), BAD, ids=[line[:90] for line, _ in BAD])
def test_bad_input_is_one_short_line_and_exit_code_2(
    cli: Command, tmp_path: Path, line: str, token: str
) -> None:
    """The line holds what was given, or what is allowed; nothing is printed nor written."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    ended = cli(*shlex.split(line))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert len(ended.err.splitlines()) == 1
    assert len(ended.err) <= 401
    assert token in ended.err
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


def test_every_option_that_takes_a_value_has_a_case() -> None:
    """A new option needs a line in the data."""
    tried = {word for line, _ in BAD for word in shlex.split(line)}
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        for option in command.params:
            if isinstance(option, TyperOption) and not option.is_flag:
                assert tried & set(option.opts), f"{command.name} {option.opts}"
