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
COMMANDS = Path(__file__).with_name("commands.txt")


def answer(command: str) -> Any:
    """The JSON of a command, or the line that it ends with."""
    line = [sys.executable, "-m", "co2sim", *shlex.split(command), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
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
    elif sorted(str(before).split()) != sorted(str(after).split()):  # options in any order
        yield f"{path}: {str(before)[:150]} is now {str(after)[:150]}"


def main(way: str, folder: Path) -> int:
    """Record all answers, or compare; the number of commands that answer otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = COMMANDS.read_text().splitlines()
    changed = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for turn, (command, found) in enumerate(
            zip(commands, pool.map(answer, commands), strict=True), 1
        ):
            kept = folder / f"{turn:02}.json"
            if way == "record":
                kept.write_text(json.dumps(found))
                sys.stdout.write(
                    f"{command}{'  FAILS: ' + str(found) if 'exit' in found else ''}\n"
                )
                continue
            others = list(differences(json.loads(kept.read_text()), found))
            if others:
                changed += 1
                sys.stdout.write("\n  ".join([command, *others[:20], f"{len(others)} in all\n"]))
    return changed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
