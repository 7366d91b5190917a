"""Feed every reader of files and options with inputs that nobody means well, and count failures.

Inputs are drawn by Hypothesis from a seed, in parts of 250. Each is tried in this process: a
failure is anything but an answer or one line of error, a hang, too much memory, or a file left
behind. Finished parts are kept in `fuzz-SEED.csv`: a stopped run goes on where it was.
"""

import argparse
import csv
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzz_inputs import Fuzzed, values
from fuzz_trials import KINDS, files_of, trial
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from reports import folder, made_by, parser, table

from co2sim.progress import progress_bar

PART = 250
_COLUMNS = ("part", "kind", "inputs", "answered", "refused", "longest_s", "failed")


def drawn(number: int, count: int, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Fuzzed]:
    """Inputs of a seed."""
    found: list[tuple[Any, ...]] = []

    @seed(number)
    @settings(
        max_examples=min(count, 100),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(values())
    def draw(made: tuple[Any, ...]) -> None:
        found.append(made)

    with TemporaryDirectory() as home:  # else tables of characters are kept in this folder
        set_hypothesis_home_dir(home)
        try:
            draw()
        finally:
            set_hypothesis_home_dir(None)
    rng = random.Random(number)  # noqa: S311 - repeatable, not secret
    return [
        Fuzzed(rng.choice(kinds), rng.randrange(2**48), found[place % len(found)])
        for place in range(count)
    ]


def part(number: int, base: int, count: int, out: Path) -> list[dict[str, Any]]:
    """One row for each kind of a part; inputs that failed are kept as files."""
    rows: dict[str, dict[str, Any]] = {}
    for place, one in enumerate(drawn(base * 1_000_000 + number, count)):
        verdict = trial(one)
        row = rows.setdefault(
            one.kind, dict.fromkeys(_COLUMNS, 0) | {"part": number, "kind": one.kind}
        )
        row["inputs"] += 1
        row["answered"] += verdict.code == 0 and not verdict.problem
        row["refused"] += verdict.code > 0 and not verdict.problem
        row["longest_s"] = max(row["longest_s"], round(verdict.seconds, 2))
        if verdict.problem:
            row["failed"] += 1
            _keep(out / f"fuzz-{base}-failures" / f"{number}-{place}", one, verdict.problem)
    return list(rows.values())


def _keep(where: Path, one: Fuzzed, problem: str) -> None:
    made = files_of(one)
    for name, data in made.files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(data)
    where.mkdir(parents=True, exist_ok=True)
    text = f"{problem}\n\n{one.kind}: {made.words!r}\n\n{one!r}\n"
    (where / "problem.txt").write_text(text, "utf-8", errors="backslashreplace")


def finished(path: Path) -> list[dict[str, str]]:
    """The rows of parts that a run before has done."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def remaining(known: list[dict[str, str]], count: int) -> Iterator[tuple[int, int]]:
    """Numbers and sizes of parts that are still to do."""
    done = {int(row["part"]) for row in known}
    for number in range(-(-count // PART)):
        if number not in done:
            yield number, min(PART, count - number * PART)


def run(given_: argparse.Namespace, out: Path) -> list[dict[str, str]]:
    """All parts; each is appended once it is done."""
    path = out / f"fuzz-{given_.seed}.csv"
    known = finished(path)
    todo = list(remaining(known, given_.inputs))
    until = time.monotonic() + given_.minutes * 60
    with (
        path.open("a", encoding="utf-8", newline="") as file,
        ProcessPoolExecutor(given_.jobs) as pool,
        progress_bar("inputs", shown=None) as bar,
    ):
        writer = csv.DictWriter(file, _COLUMNS)
        if not known:
            writer.writeheader()
        waiting = {pool.submit(part, number, given_.seed, size, out): size for number, size in todo}
        done, total = 0, sum(size for _, size in todo)
        for future in as_completed(waiting):
            writer.writerows(future.result())
            file.flush()
            done += waiting[future]
            if bar:
                bar(done, total)
            if time.monotonic() > until:
                pool.shutdown(cancel_futures=True)
                break
    return finished(path)


def report(rows: list[dict[str, str]]) -> str:
    """A line for each kind of input, and one for all."""
    sums: dict[str, Counter[str]] = {}
    longest: dict[str, float] = {}
    for row in rows:
        for kind in (row["kind"], "all"):
            sums.setdefault(kind, Counter()).update({n: int(row[n]) for n in _COUNTED})
            longest[kind] = max(longest.get(kind, 0.0), float(row["longest_s"]))
    kinds = [*sorted(sums.keys() - {"all"}), "all"]
    return table(
        [
            {"input": kind, **{name: f"{sums[kind][name]:,}" for name in _COUNTED}}
            | {"longest": f"{longest[kind]:.1f} s"}
            for kind in kinds
        ]
    )


_COUNTED = ("inputs", "answered", "refused", "failed")


def main() -> int:
    """Try inputs, print a table; the exit code is 1 if any failed."""
    command = parser(__doc__, "60 inputs")
    command.add_argument("--inputs", type=int, default=100_000, help="how many (100000)")
    command.add_argument("--seed", type=int, default=1, help="which (1)")
    command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    command.add_argument("--minutes", type=float, default=1e6, help="stop after these")
    asked = command.parse_args()
    if asked.quick:
        asked.inputs, asked.jobs = 60, 1
    with folder(asked) as out:
        rows = run(asked, out)
        text = f"{report(rows)}\n\n{made_by()}\n"
        if asked.out or not asked.quick:
            (out / "fuzz.md").write_text(text, "utf-8")
    print(text)
    return int(any(int(row["failed"]) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
