"""Bad input of every option of `co2sim`: one line on stderr, exit code 2, and nothing written."""

import shlex
from pathlib import Path

import pytest
from commands import Command
from typer.core import TyperOption
from typer.main import get_command

from co2sim.cli.app import app

BASE = "-c dgx-h100 -m gpt2-small"
ON = f"{BASE} -s ddp -g 16"
FAILING = f"goodput {ON} --set failures=meta-rsc-1"
SOLVE = f"{ON} inter.bandwidth"
PLAN = "plan -c offer.toml -m gpt2-small --global-batch 64 -s ddp"
EXPLORE = f"explore {BASE} -s ddp -g 16"
HUGE = "9" * 400
LONG = "x" * 100_000

OFFER = """\
name = "an offer"
source = "an offer"
nodes = 4
gpus_per_node = 8
gpu = "h100"
price_per_gpu = "2 USD/h"
intra = {bandwidth = "450 GB/s", latency = "3 us"}
inter = {bandwidth = "400 Gbit/s", latency = "20 us"}
"""
CELL = (
    '[[cell]]\nwhere = "here"\nquantity = "tokens_per_s"\nuse = "check"\ncluster = "dgx-h100"\n'
    'model = "gpt2-small"\nstrategy = "ddp"\ngpus = 16\n'
)
FILES = {
    "offer.toml": OFFER,
    "zero.toml": f"{CELL}value = 0\n",
    "valueless.toml": CELL,
    "twice.json": '{"model_type": "gpt2", "extra": {"a": 1, "b": 2, "a": 1}}',
    "empty.toml": " \n",
}

BAD = [
    # commands, and options that are missing or given twice
    ("rum", "rum"),
    (f"run {BASE} -g 8", "--strategy is"),
    ("scale -s ddp", "--model, --cluster are"),
    (f"run {ON} -g 8", "--gpus is given 2"),
    (f"run {ON} --fold --no-fold", "--fold is given 2"),
    (f"run {ON} -s ddp:bucket_mib=25", "twice"),
    (f"run {ON} --no-such-option 3", "--no-such-option"),
    # names and files
    ("list a100-tcp81", "'a100-tcp80'"),
    ("run -c a100-tcp8 -m gpt2-xl -s ddp", "'a100-tcp80'"),
    ("run -c '' -m gpt2-small -s ddp", "cluster is empty"),
    ("run -c ./ -m gpt2-small -s ddp", "./ is a folder"),
    ("run -c dgx-h100 -m twice.json -s ddp", "'a'"),
    ("run -c empty.toml -m gpt2-small -s ddp", "empty.toml"),
    ("run -c /dev/zero -m gpt2-small -s ddp", "not a regular file"),
    # options of strategies
    (f"run {BASE} -s co2.published:taw=3", "'tau'"),
    (f"run {BASE} -s co2.published:inner=zero2", "worker=node"),
    (f"run {BASE} -s co2.published:tau=0", "tau is 0"),
    (f"run {BASE} -s zero2:bucket=1", "10000"),
    # numbers of the cluster and of the model
    (f"run {ON} --set interference", "NAME=VALUE"),
    (f"run {ON} --set nodes=2 --set nodes=3", "nodes is given twice"),
    (f"run {ON} --set inter.bandwith=1", "'inter.bandwidth'"),
    (f"run {ON} --set inter.bandwidth=25", "has no unit"),
    (f"run {ON} --set inter.efficiency=5e-324", "1e-18"),
    (f"run {ON} --set scatter.compute=2e8 --set scatter.communication=2", "at most 5"),
    (f"run {ON} --set 'inter.latency=1e308 s'", "at most 1e+60"),
    (f"run {ON} --set 'price_per_gpu=-2 EUR/h'", "-2 EUR/h"),
    (f"run {ON} --set model.vocab={HUGE}", "vocab"),
    # the job
    (f"run {BASE} -s ddp -g 12", "multiple of 8"),
    (f"run {BASE} -s ddp -g many", "'many'"),
    (f"run {BASE} -s ddp -g 1000000000000", "1 to 10000000"),
    (f"run {ON} --micro-batch 0", "micro_batch is 0"),
    (f"run {ON} --micro-batch {LONG}", "whole number"),
    (f"run {ON} --accumulation 1000000000", "1000000000"),
    (f"run {ON} --global-batch 100", "16 GPUs"),
    (f"run {ON} --tp 3", "tp=3"),
    (f"run {ON} --ep 3", "ep=3"),
    (f"run {ON} --cp 3", "cp=3"),
    (f"run {ON} --lora 0", "lora is 0"),
    (f"run {ON} --sequence-parallel", "sequence_parallel"),
    (f"run {ON} --pp 3", "pp=3"),
    (f"run {ON} --interleave 2", "interleave=2"),
    (f"run {ON} --precision fp6", "fp16"),
    (f"run {ON} --attention none", "flash"),
    (f"run {ON} --recompute all", "selective"),
    (f"run {ON} --checkpointing all", "non_reentrant"),
    (f"run {ON} --loss all", "fused"),
    (f"run {ON} --stack torchtitn", "torchtitan"),
    (f"run {ON} --set stack.elementwise=0.5", "at least 1"),
    (f"run {ON} --optimizer adam", "adamw"),
    (f"run {ON} --offload gradients", "none, optimizer"),
    # the simulation
    (f"run {ON} --seed -1", "seed is -1"),
    (f"run {ON} --jitter -1", "jitter is -1"),
    (f"run {ON} --straggle much", "--straggle is 'much'"),
    (f"run {ON} --node-speed 9=0.5", "0 to 1"),
    (f"run {ON} --rounds 1000000000", "1 to 1000000"),
    (f"run {ON} --rounds 1000000 --no-fold", "16: this needs"),
    (f"show {BASE} -s co2.published:tau=10000 -g 16 --accumulation 100", "10000 local steps"),
    (f"run {ON} --interval slow", "quick"),
    # totals and losses
    (f"run {ON} --tokens 0", "tokens is 0"),
    (f"sweep {BASE} -s ddp --vary gpus=8 --tokens nan", "nan"),
    (f"run {ON} --to-loss-steps 1.5", "'1.5'"),
    (f"run {ON} --steps-factor co2", "STRATEGY=N"),
    (f"run {ON} --steps-factor co2=1 --steps-factor co2=2", "co2 is given twice"),
    # files to write
    (f"trace {ON} -o trace.txt", ".jsonl"),
    (f"run {ON} --report page.txt", ".html"),
    (f"sweep {ON} --vary seed=1,2 --jobs 1 --csv /dev/null", "/dev/null"),
    (f"scale {BASE} -s ddp -g 8 --out empty.toml/out", "empty.toml"),
    # scale, report and their published cells
    (f"scale {BASE} -s ddp -g 8,12", "12 GPUs"),
    (f"scale {BASE} -s ddp -g 8,8", "twice"),
    (f"scale {BASE} -s ddp -g 8 --jobs 0", "jobs is 0"),
    (f"scale {BASE} -s ddp -g 8 --published none.toml", "none.toml"),
    (f"scale {BASE} -s ddp -g 16 --published zero.toml", "value is 0"),
    (f"report {BASE} -s ddp -g 16 --published valueless.toml", "value is missing"),
    (f"report {BASE} -s ddp -g 16 --out report.pdf", ".html"),
    # sweep
    (f"sweep {ON} --vary gpus=16,24", "--vary gpus"),
    (f"sweep {ON} --micro-batch 1 --vary micro_batch=1,2", "--vary micro_batch"),
    ("sweep -c dgx-h100 -m gpt2-small --vary seed=1,2", "--strategy is missing"),
    (f"sweep {ON} --vary 'inter.bandwidth=1 Gbit/s,x'", "'x'"),
    (f"sweep {ON} --vary micro_batch=1,,2", "empty"),
    (f"sweep {ON} --vary seed=1,2 --sort speed", "'speed'"),
    (f"sweep {ON} --vary seed=1,2 --out o --csv c.csv", "--csv and --out"),
    (f"sweep {ON} --vary seed=1,2 --shard 1/2", "--out"),
    (f"sweep {ON} --vary seed=1,2 --out o --shard 2", "'2'"),
    (f"sweep {ON} --vary seed=1,2 --engine dusk", "'dask'"),
    (f"sweep {ON} --vary seed=1,2 --scheduler tcp://h:1", "scheduler"),
    (f"sweep {ON} --vary seed=1,2 --engine dask --scheduler no.json", "no such file"),
    # solve
    (f"solve {ON} inter.bandwith", "'inter.bandwith'"),
    (f"solve {ON} backend", "backend"),
    (f"solve {SOLVE} --for speed=3", "'speed'"),
    (f"solve {SOLVE} --for efficiency=90", "90%"),
    (f"solve {SOLVE} --for mfu", "mfu=90%"),
    (f"solve {SOLVE} --for fits=3", "fits takes no value"),
    (f"solve {SOLVE} --for step=3", "has no unit"),
    (f"solve {SOLVE} --for tokens_per_s=5%", "is a share"),
    (f"solve {SOLVE} --for days=3", "tokens"),
    (f"solve {SOLVE} --for cost=3 --tokens 1e9", "price"),
    (f"solve {SOLVE} --for usd=3 --tokens 1e9 --set 'price_per_gpu=2 EUR/h'", "EUR"),
    (f"solve {SOLVE} --for goodput", "failures"),
    (f"solve {SOLVE} --from '1 s'", "does not fit"),
    (f"solve {SOLVE} --from '2 GB/s' --to '1 GB/s'", "below the second"),
    (f"solve {ON} gpus", "--gpus is given"),
    (f"solve {ON} micro_batch --from 2.5", "whole number"),
    (f"solve {BASE} -g 16 -s co2:tau=auto,delay=auto inter.bandwidth", "tau=auto"),
    (f"solve {ON} --set 'inter.latency=1 us' inter.latency", "--set inter.latency"),
    # plan
    (f"{PLAN} --tokens 1e9 --want best", "least-energy"),
    (f"{PLAN} --tokens 1e9 --deadline 30", "--deadline"),
    (f"{PLAN} --tokens 1e9 --budget -5", "-5"),
    (f"{PLAN} --tokens 1e9 --power 5", "--power"),
    (f"{PLAN} --tokens 1e9 --headroom 120%", "1.2"),
    (f"{PLAN} --tokens 1e9 --headroom 99.99%", "fits in memory"),
    (PLAN, "--to-loss-steps"),
    (f"{PLAN} --tokens 1e9 --to-loss-steps 10", "not both"),
    (f"plan --tokens 1e9 {BASE} -s ddp --budget 5", "price_per_gpu"),
    (f"plan --tokens 1e9 {BASE} -s ddp --want cheapest", "price_per_gpu"),
    # own
    ("own -c dgx-h100 --years 1e400", "0.25 to 20"),
    ("own -c dgx-h100 --utilization 120%", "0.1% to 100%"),
    ("own -c dgx-h100 --set own.=3", "own.node"),
    # goodput
    (f"goodput {ON}", "failures=meta-rsc-1"),
    (f"{FAILING} --every '0 s'", "above 0"),
    (f"{FAILING} --set failures.checkpoint_bandwidth='1 MB/s' --every '1 s'", "less often"),
    (f"{FAILING} --set 'failures.node=1 s'", "nothing gets done"),
    # calibrate
    (f"calibrate {BASE} -s ddp --runs none.csv --out own.toml", "none.csv"),
    (f"calibrate {BASE} -s ddp --runs empty.toml --out own.toml", "no rows"),
    # export, replay and explore
    (f"export {ON} --out empty.toml", "empty.toml"),
    ("replay none -c dgx-h100", "none"),
    (f"{EXPLORE} --vary strategy.bucket_mib=1,2", "--out"),
    (f"{EXPLORE} --out p.html --tolerance 0.9", "--tolerance is 0.9"),
    (f"{EXPLORE} --port 70000", "65535"),
    ("explore --out p.html", "--cluster is missing"),
]


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
    """A new option needs a line in the table above."""
    tried = {word for line, _ in BAD for word in shlex.split(line)}
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        for option in command.params:
            if isinstance(option, TyperOption) and not option.is_flag:
                assert tried & set(option.opts), f"{command.name} {option.opts}"
