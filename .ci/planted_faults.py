"""How many small faults does `make test` notice? Plants them one at a time in a clone of HEAD.

`python .ci/planted_faults.py FOLDER... --count 200 --seed 1` draws faults from OPERATORS over the
files of the folders and runs, for each, the tests of `make test` that reach its line, the quickest
first. Lines that only other processes reach are tried with all tests that start processes.
"""

import argparse
import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
GIT = shutil.which("git") or "git"
SECONDS = 120.0
"""Of tests for one fault: the quickest that reach it; the rest is not run."""

_COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.Pow: "*",
}  # fmt: skip
_OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor"}
_NOT_RUN = (ast.AnnAssign, ast.Assert, ast.Import, ast.ImportFrom)


class Fault(NamedTuple):
    """A change of one place of a file."""

    operator: str
    path: str
    line: int
    begin: int
    end: int
    text: str


class Source:
    """The text of a file, and where its nodes stand."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def offset(self, line: int, column: int) -> int:
        """Characters before a place that `ast` gives as a line and bytes in it."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        """Where a node begins and ends, in characters."""
        begin = self.offset(node.lineno, node.col_offset)
        return begin, self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: Any) -> str:
        """The text of a node."""
        begin, end = self.span(node)
        return self.text[begin:end]


Change = tuple[str, tuple[int, int], str]
"""An operator, the characters that change, and what stands there then."""


def changes(node: ast.AST, source: Source) -> Iterator[Change]:
    """The faults of one node."""
    match node:
        case ast.Compare(left, [operation], [right]):
            text = f"{source.of(left)} {_COMPARE[type(operation)]} {source.of(right)}"
            yield "comparison", source.span(node), text
        case ast.BinOp(left, operation, right) if type(operation) in _ARITHMETIC:
            text = f"({source.of(left)} {_ARITHMETIC[type(operation)]} {source.of(right)})"
            yield "arithmetic", source.span(node), text
        case ast.BoolOp(operation, values):
            other = " or " if isinstance(operation, ast.And) else " and "
            text = other.join(f"({source.of(value)})" for value in values)
            yield "boolean", source.span(node), f"({text})"
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield "negation dropped", source.span(node), f"({source.of(operand)})"
        case ast.Constant():
            yield from changed_constant(node, source)
        case ast.Call():
            yield from changed_call(node, source)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "condition negated", source.span(test), f"(not ({source.of(test)}))"
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield "statement dropped", source.span(node), "pass"
        case ast.Return(ast.expr() as result):
            yield "result dropped", source.span(result), "None"


def changed_constant(node: ast.Constant, source: Source) -> Iterator[Change]:
    """The other truth value, one more, or twice as much."""
    match node.value:
        case bool():
            yield "constant", source.span(node), str(not node.value)
        case int():
            yield "constant", source.span(node), str(node.value + 1)
        case float() if node.value:
            yield "constant", source.span(node), repr(node.value * 2)


def changed_call(node: ast.Call, source: Source) -> Iterator[Change]:
    """The opposite function, or the first two arguments swapped."""
    if isinstance(node.func, ast.Name) and node.func.id in _OPPOSITE:
        yield "opposite function", source.span(node.func), _OPPOSITE[node.func.id]
    if len(node.args) > 1:
        first, second, *_ = node.args
        begin, end = source.span(first)
        next_begin, next_end = source.span(second)
        between = source.text[end:next_begin]
        text = f"{source.of(second)}{between}{source.of(first)}"
        yield "arguments swapped", (begin, next_end), text


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes within functions, without annotations, decorators, asserts and messages of errors."""
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, inside = waiting.pop()
        if isinstance(node, (*_NOT_RUN, ast.JoinedStr, ast.Raise)):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [(child, True) for child in node.body]
            continue
        if inside:
            yield node
        waiting += [(child, inside) for child in ast.iter_child_nodes(node)]


def drawn(folders: list[str], count: int, seed: int) -> list[Fault]:
    """Faults at random: each operator is as likely as the others, then each place."""
    sources, places = {}, defaultdict(list)
    for folder in folders:
        path = ROOT / folder
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = str(file.relative_to(ROOT))
            sources[name] = Source(file.read_text())
            for node in executed(ast.parse(sources[name].text)):
                for operator, *change in changes(node, sources[name]):
                    places[operator].append((name, node, *change))
    generator = random.Random(seed)  # noqa: S311 - no secret
    found: list[Fault] = []
    while len(found) < count:
        operator = generator.choice(sorted(places))
        name, node, (begin, end), text = generator.choice(places[operator])
        source = sources[name].text
        try:
            changed = ast.parse(source[:begin] + text + source[end:])
        except SyntaxError:
            continue
        if ast.dump(changed) != ast.dump(ast.parse(source)):
            found.append(Fault(operator, name, node.lineno, begin, end, text))
    return found


class Reached(NamedTuple):
    """What the tests of `make test` reach, and how long each takes."""

    lines: dict[tuple[str, int], set[str]]
    seconds: dict[str, float]
    processes: list[str]

    def quickest(self, names: Iterable[str]) -> list[str]:
        """Of these tests, those that together take at most SECONDS."""
        chosen, budget = [], SECONDS
        for name in sorted(names, key=lambda name: self.seconds[name]):
            budget -= self.seconds[name]
            if budget > 0:
                chosen.append(name)
        return chosen


def run_tests(clone: Path, *arguments: str, seconds: float, **environment: str) -> int | None:
    """The exit code of pytest in a clone, or None if it took too long."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command,
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(clone), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return None


MADE = "not nightly and not gpu"
"""The tests of `make test`."""


def reached(clone: Path, folder: Path) -> Reached:
    """Run all tests of `make test` once, and record which lines each one reaches."""
    (folder / "rc").write_text(
        f"[run]\nbranch = false\nsource = co2sim,realrun,analysis\ndata_file = {folder}/data\n"
    )
    plugin = folder / "durations_of_tests.py"
    plugin.write_text(
        "import json, os\n"
        "def pytest_runtest_logreport(report):\n"
        "    if 'PYTEST_XDIST_WORKER' not in os.environ:\n"
        f"        with open({str(folder / 'durations')!r}, 'a') as file:\n"
        "            row = [report.nodeid, report.duration, sorted(report.keywords)]\n"
        "            file.write(json.dumps(row) + '\\n')\n"
    )
    coverage = (f"--cov-config={folder}/rc", "--cov", "--cov-context=test", "--cov-report=")
    everything = ("-n", "2", "--dist", "loadscope", "-m", MADE, "-p", plugin.stem)
    path = f"{clone}{os.pathsep}{folder}"
    code = run_tests(clone, *everything, *coverage, seconds=3600.0, PYTHONPATH=path)
    if code != 0:
        sys.exit(f"the tests do not pass without a fault: exit code {code}")
    seconds: dict[str, float] = defaultdict(float)
    processes: dict[str, None] = {}
    for line in (folder / "durations").read_text().splitlines():
        name, duration, keywords = json.loads(line)
        seconds[name] += duration
        if {"dist", "lab", "slow"} & set(keywords):
            processes[name] = None
    lines: dict[tuple[str, int], set[str]] = defaultdict(set)
    with sqlite3.connect(folder / "data") as data:
        rows = data.execute(
            "SELECT path, context, numbits FROM line_bits JOIN file ON file.id = file_id"
            " JOIN context ON context.id = context_id"
        )
        for path, context, bits in rows:
            test = context.partition("|")[0]
            for index, byte in enumerate(bits):
                for bit in range(8):
                    if test and byte >> bit & 1:
                        lines[str(Path(path).relative_to(clone)), index * 8 + bit].add(test)
    return Reached(lines, seconds, list(processes))


def noticed(fault: Fault, clone: Path, known: Reached) -> str:
    """How the tests notice a fault: "failed", "hung", or nothing."""
    path = clone / fault.path
    source = path.read_text()
    path.write_text(source[: fault.begin] + fault.text + source[fault.end :])
    try:
        near = known.lines.get((fault.path, fault.line), set())
        rest = [name for name in known.processes if name not in near]
        for names in (near, rest if fault.path.startswith("realrun") or not near else []):
            names = known.quickest(names)  # noqa: PLW2901
            if names:
                code = run_tests(clone, "-x", *names, seconds=5 * SECONDS)
                if code != 0:
                    return "hung" if code is None else "failed"
        return ""
    finally:
        path.write_text(source)


def clones_in(folder: Path) -> list[Path]:
    """A clone of HEAD for each core, with the published tables beside it."""
    made = []
    for index in range(os.cpu_count() or 1):
        clone = folder / f"clone{index}" / "co2sim"
        subprocess.run([GIT, "clone", "--quiet", str(ROOT), str(clone)], check=True)
        if (tables := ROOT.parent / "shared").exists():
            (clone.parent / "shared").symlink_to(tables)
        made.append(clone)
    return made


def main() -> None:
    """Draw faults, plant them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="folders or files with the code to change")
    parser.add_argument("--count", type=int, default=200, help="faults to plant")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other faults")
    parser.add_argument("--out", type=Path, required=True, help="the file of the table")
    arguments = parser.parse_args()
    chosen = drawn(arguments.folders, arguments.count, arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        clones: Queue[Path] = Queue()
        for clone in clones_in(Path(name)):
            clones.put(clone)
        known = reached(clones.queue[0], Path(name))

        def plant(fault: Fault) -> str:
            clone = clones.get()
            try:
                result = noticed(fault, clone, known)
            finally:
                clones.put(clone)
            print(
                f"{result or 'SURVIVED':8} {fault.path}:{fault.line} {fault.operator}", flush=True
            )
            return result

        with ThreadPoolExecutor(clones.qsize()) as threads:
            results = list(threads.map(plant, chosen))
    report = table(chosen, results, arguments.seed)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(report)
    print(report)


def table(chosen: list[Fault], results: list[str], seed: int) -> str:
    """How many faults were planted in each package and noticed, and those that were not."""
    head = [GIT, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [f"# {len(chosen)} planted faults, seed {seed}, commit {commit.stdout.strip()}", ""]
    lines += ["| package | planted | noticed |", "|---|---|---|"]
    planted = Counter(fault.path.split("/")[0] for fault in chosen)
    survivors = [fault for fault, result in zip(chosen, results, strict=True) if not result]
    survived = Counter(fault.path.split("/")[0] for fault in survivors)
    for package, count in planted.items():
        lines.append(f"| {package} | {count} | {count - survived[package]} |")
    lines.append(f"| all | {len(chosen)} | {len(chosen) - len(survivors)} |")
    if survivors:
        lines += ["", "Not noticed:", "", "| place | operator | becomes |", "|---|---|---|"]
    for fault in survivors:
        text = " ".join(fault.text.split())[:80].replace("|", "\\|")
        lines.append(f"| {fault.path}:{fault.line} | {fault.operator} | `{text}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
