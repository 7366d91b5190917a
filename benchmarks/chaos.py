"""Let faults befall runs, trainings, labs and studies at random times, and count what goes wrong.

    python benchmarks/chaos.py            # 1,000 trials, an hour on two quiet cores; root for all
    python benchmarks/chaos.py --quick    # 6 trials

Trials are drawn from a seed. Those that are done stand in out/chaos/SEED.jsonl, one a line: a
stopped campaign goes on where it was. Writes benchmarks/results/chaos.md.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: one process forks all others
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as launchers set it

import chaos_start
import chaos_trial
from chaos_plan import FAULTS, Trial, drawn
from reports import commit, folder, installed, machine, made_by, parser, table

from co2sim.progress import progress_bar


def finished(path: Path) -> dict[int, dict[str, Any]]:
    """Verdicts that were kept, by trial; a line that was cut off does not count."""
    found = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found[one["number"]] = one
    return found


def campaign(given: argparse.Namespace, base: Path) -> list[dict[str, Any]]:
    """Make all trials that are not done, some at a time; their verdicts, in order."""
    path = base / f"{given.seed}.jsonl"
    known = finished(path)
    if given.again:
        known = {number: one for number, one in known.items() if not one["problem"]}
    asked = [one for one in drawn(given.seed, given.trials, few=given.quick) if wanted(given, one)]
    waiting = [one for one in asked if one.number not in known]
    (base / "trials").mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if waiting:
        chaos_start.load()
    import_s = time.monotonic() - began
    running: dict[int, Trial] = {}
    now = commit()
    until = time.monotonic() + given.minutes * 60
    with path.open("a", encoding="utf-8") as file, progress_bar("trials", shown=None) as bar:
        try:
            while running or (waiting and time.monotonic() < until):
                while waiting and len(running) < given.jobs and time.monotonic() < until:
                    one = waiting.pop(0)
                    running[_forked(one, base, import_s)] = one
                pid, _ = os.wait()
                verdict = _verdict(running.pop(pid), base) | {"commit": now}
                known[verdict["number"]] = verdict
                file.write(json.dumps(verdict) + "\n")
                file.flush()
                _say(verdict)
                if bar:
                    bar(len(known), len(asked))
        finally:
            _end(running)
    return [known[one.number] for one in asked if one.number in known]


def wanted(given: argparse.Namespace, one: Trial) -> bool:
    """Whether a trial is among those that were asked for."""
    return given.only in f"{one.target}: {one.fault}: {one.strategy}" and (
        given.number is None or one.number == given.number
    )


def _forked(one: Trial, base: Path, import_s: float) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        try:
            chaos_trial.run(one, base, import_s)
        finally:
            os._exit(0)
    return pid


def _verdict(one: Trial, base: Path) -> dict[str, Any]:
    """What the process of a trial has written; that it wrote nothing is a failure, too."""
    path = base / "trials" / f"{one.number}.json"
    if not path.exists():
        return {"number": one.number, "target": one.target, "fault": one.fault} | {
            "strategy": one.strategy,
            "problem": "the trial itself failed",
            "skipped": "",
            "happened": "",
        }
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    chaos_trial.tidied(one, base)
    return found


def _say(verdict: dict[str, Any]) -> None:
    words = verdict["problem"] or verdict["skipped"] or "ok"
    what = f"{verdict['target']} {verdict['strategy']}, {verdict['fault']}"
    seconds = f"{verdict.get('seconds', 0):.0f} s"
    print(
        f"{verdict['number']}: {what} ({verdict['happened']}): {words}, {seconds}", file=sys.stderr
    )


def _end(running: dict[int, Trial]) -> None:
    """End trials that are not over, and wait until what they started is gone."""
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    for pid in running:
        os.waitpid(pid, 0)


def report(verdicts: list[dict[str, Any]]) -> str:
    """Counts by fault and target."""
    rows = []
    for fault in dict.fromkeys(name for names in FAULTS.values() for name in names):
        row = {"fault": fault}
        for target in FAULTS:
            row[target] = _cell(
                [v for v in verdicts if (v["fault"], v["target"]) == (fault, target)]
            )
        rows.append(row | {"all": _cell([v for v in verdicts if v["fault"] == fault])})
    rows.append(
        {"fault": "all"} | {t: _cell([v for v in verdicts if v["target"] == t]) for t in FAULTS}
    )
    rows[-1]["all"] = _cell(verdicts)
    return table(rows)


def _cell(verdicts: list[dict[str, Any]]) -> str:
    made = [one for one in verdicts if not one["skipped"]]
    good = sum(not one["problem"] for one in made)
    return f"{good} of {len(made)}" if made else ""


def text(verdicts: list[dict[str, Any]], seed: int) -> str:
    """The page of results."""
    made = [one for one in verdicts if not one["skipped"]]
    failed = [one for one in made if one["problem"]]
    skipped = Counter(one["skipped"] for one in verdicts if one["skipped"])
    late = sum(not one["happened"] for one in made)
    plain = sum(bool(one.get("plain")) for one in made)
    commits = ", ".join(dict.fromkeys(one["commit"] for one in verdicts))
    words = [f"{count} were not made: {why}." for why, count in skipped.items()]
    failures = [
        f"- {one['number']}, {one['target']}, {one['fault']}: {one['problem']}" for one in failed
    ]
    return f"""\
# Faults at random times

{len(made):,} trials of seed {seed}: {len(made) - len(failed):,} as they should be, {len(failed)}\
 not. In each a command is hit by a fault at a random time from its start to its end; in {late} of\
 them it had ended, or there was nothing to hit. It must end in time with the right exit code and\
 a line that names the rank and the cause, without a traceback. No process, namespace, port, file\
 in /dev/shm or temporary file may be left. What was saved must be whole: a training goes on from\
 it, and ends bit for bit like one that nothing befell. {plain} trials started the launcher\
 as users do; the others forked it from a process that had loaded torch.\
 {" ".join(words)} Tried at commit {commits}. {machine()} psutil {installed("psutil")}.

{report(verdicts)}

{os.linesep.join(failures) or "No trial failed."}

{made_by()}
"""


def main() -> int:
    """Make trials, and write the table; the exit code is 1 if any failed."""
    command = parser(__doc__, "6 trials")
    command.add_argument("--trials", type=int, default=1000, help="how many (1000)")
    command.add_argument("--seed", type=int, default=1, help="which (1)")
    command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    command.add_argument("--minutes", type=float, default=1e6, help="start none after these")
    command.add_argument("--only", default="", help="of 'target: fault: strategy' that have this")
    command.add_argument("--number", type=int, help="only this one")
    command.add_argument("--again", action="store_true", help="those that failed once more")
    command.add_argument("--work", type=Path, default=Path("out/chaos"), help="folder of trials")
    given = command.parse_args()
    if given.quick:
        given.trials = min(given.trials, 6)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with folder(given) as out:
        base = (out if given.quick else given.work).absolute()
        base.mkdir(parents=True, exist_ok=True)
        try:
            verdicts = campaign(given, base)
        except KeyboardInterrupt:
            print("interrupted; trials that are done are kept", file=sys.stderr)
            return 130
        found = text(verdicts, given.seed)
        if given.out or not given.quick:
            (out / "chaos.md").write_text(found, "utf-8")
    print(found)
    return int(any(one["problem"] for one in verdicts))


if __name__ == "__main__":
    sys.exit(main())
