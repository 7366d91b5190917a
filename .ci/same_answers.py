"""Whether commands answer as they did: their JSON, recorded before a change, and compared after it.

`python .ci/same_answers.py record FOLDER` at one commit, `... compare FOLDER` at another one. A
number that differs by more than 1e-9 of its size is printed, and what is missing or new.
"""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

EQUAL = 1e-9
AT_ONCE = 2
COMMANDS = """\
run -c dgx-h100 -m llama-7b -s zero2 -g 64
run -c dgx-h100 -m llama-7b -s zero2 -g 64 --micro-batch 1 --accumulation 1
run -c a100-roce800 -m llama-7b -s ddp -s zero1 -s zero3 -s fsdp -s zeropp -g 128 --evidence
run -c a100-tcp80 -m transnormer-7b -s co2.published:tau=48,worker=node,inner=zero2 -g 64 --tokens 1e11
run -c a100-tcp80 -m gpt2-xl -s co2:worker=node -s local_sgd:tau=12 -s diloco:tau=24,worker=node -s slowmo:tau=12 -g 32
run -c a100-tcp80 -m gpt2-xl -s overlap_local_sgd:tau=12 -g 32 --to-loss-steps 10000 --steps-factor overlap_local_sgd=1.2
run -c dgx-h100 -m mixtral-8x7b -s zero1 -g 64 --ep 8 --pp 2
run -c dgx-h100 -m deepseek-v3 -s zero1 -g 1024 --ep 64 --pp 16 --precision fp8
run -c dgx-h100 -m llama3-8b -s fsdp -g 64 --cp 4 --set model.seq_len=65536
run -c dgx-h100 -m llama3-70b -s zero1 -g 128 --tp 4 --sequence-parallel --pp 4 --cp 2 --stack megatron-core
run -c dgx-h100 -m llama3-70b -s zero1 -g 128 --tp 8 --sequence-parallel --pp 4 --interleave 5 --stack megatron-core --global-batch 4M-tokens
run -c dgx-h100 -m llama3-8b -s fsdp -g 64 --precision fp8 --recompute full/2
run -c dgx-b200 -m llama3-8b -s fsdp -g 64 --precision nvfp4 --micro-batch 2 --accumulation 4
run -c dgx-h100 -m llama3-70b -s fsdp -g 16 --lora 16
run -c dgx-a100 -m llama-13b -s zero2 -g 16 --offload optimizer
run -c dgx-a100 -m llama-13b -s zero3 -g 16 --optimizer adamw_8bit --attention eager --loss eager --checkpointing reentrant --recompute full
run -c a100-roce800 -m llama-7b -s co2:tau=12,delay=3,worker=node -g 96 --jitter 0.05 --micro-batch 1 --accumulation 1 --rounds 3
run -c a100-roce800 -m llama-7b -s zero3 -g 32 --jitter 0.05 --micro-batch 1 --accumulation 1 --rounds 1
run -c a100-roce800 -m llama-7b -s ddp -g 64 --straggle 0.1 --micro-batch 1 --accumulation 2
run -c a100-roce800 -m llama-7b -s fsdp:shard=node -g 64 --node-speed 3=0.8 --no-fold --micro-batch 1 --accumulation 2
run -c two-sites-wan -m llama-7b -s diloco:tau=100,worker=site,inner=fsdp -s co2:tau=50,delay=20,worker=site,inner=zero2
run -c two-sites-wan -m llama-7b -s zero2
run -c a100-tcp80-calibrated -m transnormer-7b -s zeropp -s ddp -g 64 --stack transnormer-2023 --micro-batch 1 --accumulation 1 --recompute none --interval full
run -c p5.48xlarge -m llama3-8b -s fsdp -g 256 --tokens 1T --set inter.bandwidth="1600 Gbit/s"
run -c dgx-h100 -m vit-b16 -s ddp -g 32
run -c gb200-nvl72 -m llama3-70b -s fsdp:reshard_after_forward=false -g 72 --stack torchtitan
run -c nd-mi300x-v5 -m qwen3-235b-a22b -s zero1 -g 256 --ep 16 --pp 4
scale -c a100-tcp80 -c a100-roce800 -m llama-7b -s zeropp -s ddp -s co2:tau=12,worker=node --gpus 8,16,32,64,128 --tokens 1e11
scale -c dgx-h100 -m llama3-70b -s zero1 --tp 8 --pp 2 --gpus 32,64,128
sweep -c a100-tcp80 -m llama-7b -s zero2 -g 64 --vary inter.bandwidth="25 Gbit/s,100 Gbit/s,400 Gbit/s" --vary micro_batch=1,2,4
sweep -c a100-tcp80 -m llama-7b -s co2:tau=12 -g 64 --vary strategy.tau=2,12,48 --vary strategy.delay=1,2
solve inter.bandwidth -c a100-tcp80 -m llama-7b -s zero2 -g 64
solve strategy.tau -c a100-tcp80 -m llama-7b -s local_sgd:tau=12,worker=node -g 64 --for efficiency=90%
solve gpus -c p5.48xlarge -m llama3-8b -s fsdp --for days=30 --tokens 1T
plan -c dgx-h100 -m llama3-70b -g 128 --tokens 1e12
plan -c p5.48xlarge -c a3-megagpu-8g -m llama3-8b -g 64,128 --tokens 1T --deadline "60 days"
plan -c two-sites-wan -m llama-7b --tokens 1e11 --recompute none,full
plan -c dgx-h100 -m mixtral-8x7b -g 64 --stack torchtitan,megatron-core --to-loss-steps 100000
own -c dgx-h100 -g 256
own -c dgx-h100 -m llama3-8b -s fsdp -g 256
goodput -c dgx-h100 -m llama3-70b -s zero1 -g 1024 --tp 8 --pp 4 --set failures=llama3-405b
goodput -c dgx-h100 -m llama-7b -s co2:tau=12,worker=node -g 512 --set failures=llama3-405b
"""


def answer(command: str) -> Any:
    """The JSON of a command, or the line that it ends with."""
    line = [sys.executable, "-m", "co2sim", *shlex.split(command), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode == 0:
        return json.loads(done.stdout)
    return {"exit": done.returncode, "error": done.stderr.strip().splitlines()[-1:]}


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """The places where two answers differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            if key in before and key in after:
                yield from differences(before[key], after[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: {'new' if key in after else 'missing'}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{path}[{place}]")
    elif isinstance(before, int | float) and isinstance(after, int | float):
        if not math.isclose(before, after, rel_tol=EQUAL, abs_tol=0.0):
            yield f"{path}: {before} is now {after}"
    elif before != after:
        yield f"{path}: {str(before)[:150]} is now {str(after)[:150]}"


def main(way: str, folder: Path) -> int:
    """Record all answers, or compare; the number of commands that answer otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = COMMANDS.splitlines()
    changed = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn, (command, found) in enumerate(
            zip(commands, pool.map(answer, commands), strict=True), 1
        ):
            kept = folder / f"{turn:02}.json"
            if way == "record":
                kept.write_text(json.dumps(found))
                sys.stdout.write(f"{command}{'  FAILS: ' + str(found) if 'exit' in found else ''}\n")
                continue
            others = list(differences(json.loads(kept.read_text()), found))
            if others:
                changed += 1
                sys.stdout.write("\n  ".join([command, *others[:20], f"{len(others)} in all\n"]))
    return changed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
