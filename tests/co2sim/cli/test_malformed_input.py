"""Malformed files and absurd options, in process: an answer, or exit code 2 and one line.

Files are made by Hypothesis from well-formed ones: a value replaced, removed, repeated or buried,
or bytes changed. Whatever they are, a command ends with code 0 or 2; a refusal is exactly one line
of at most 400 characters, without a traceback or a control character, and leaves no file behind.
"""

import contextlib
import copy
import io
import json
import re
import resource
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st
from places import DATA, ROOT
from tiny import VARIANTS, recorded_run

from analysis.cli import main as co2analysis
from analysis.published.tables import from_csv
from co2sim.catalog.specs import UNITS as UNITS_OF
from co2sim.cli import main as co2sim
from co2sim.common.errors import Co2simError, error_line
from co2sim.prediction.published import read_speeds

Files = Mapping[str, bytes]

LONGEST_LINE = 400
MAX_BYTES = 2**30
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def judged(main: Callable[[], object], words: list[str], files: Files) -> int:
    """Run a command in an empty folder with these files, check how it ends, and give its code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        tempfile.TemporaryDirectory() as place,
        contextlib.chdir(place),
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        for name, data in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(data)
        patch.setattr(sys, "argv", [main.__module__.partition(".")[0], *words])
        given_files = {str(path) for path in Path().rglob("*")}
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except Co2simError as error:  # a reader that is called without a command
            code = 2
            print(error_line(str(error)), file=sys.stderr)  # noqa: T201 - as a command does
        left = {path for path in Path().rglob("*") if str(path) not in given_files}
        left = {path for path in left if code or path.name.startswith(".")}
    said = err.getvalue().replace("\r", "")
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert code in {0, 2}, (code, said[-400:])
    assert len(errors) == (1 if code else 0), said[-400:]
    assert all(len(line) <= LONGEST_LINE for line in errors), len(errors[0])
    assert "Traceback" not in said
    assert not CONTROL.search(out.getvalue() + said), CONTROL.search(out.getvalue() + said)
    assert not any(path.is_file() for path in left), left
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MAX_BYTES
    return code


# --- values and changes --------------------------------------------------------------------------

NUMBERS = (
    *("5e-324", "-5e-324", "1e308", "1e309", "-0.0", "0", "-1", "1", "2", "nan", "inf", "-inf"),
    *("1e-300", "1e30", "9" * 400, "9" * 5000, "1e18", "0x10", "1_000", "1,5", "1e", "0.1"),
    *("\u0663", "\uff11\uff12", "\u00bd", "\u00b2", "12.5", "1e6", "1e9", "1e12", "1000000"),
)
UNITS = ("", "%", "Pbit", *sorted(set(UNITS_OF.values())))
TEXTS = (
    *("", " ", "true", "[]", "{}", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\u202eabc", "a\nb"),
    *("\x00", "\ud800", "x" * 100_000, "[" * 3000, "../../etc/passwd", "/dev/zero", "~", "a=b"),
    *("h100", "virtual", "nccl", "meta-rsc-1", "france", '"' + '\\"' * 40_000, "gpu.toml", "."),
    *("1" * 30_000 + "\n\nx", "1 a" + " " * 30_000 + "a", "%s%n", "${HOME}", "`id`", "\r\n"),
)
numbers = st.builds("{}{}{}".format, st.sampled_from(NUMBERS), st.sampled_from(("", " ")),
                    st.sampled_from(UNITS))  # fmt: skip
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12),
    st.sampled_from([*NUMBERS, *TEXTS]), numbers, st.just(10**400),
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a tree."""
    for key, node in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(node, dict | list):
            yield from places(node, (*path, key))


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with one value replaced, removed, added, repeated or buried."""
    tree = copy.deepcopy(tree)
    *parents, last = draw(st.sampled_from(list(places(tree))))
    node = tree
    for key in parents:
        node = node[key]
    match draw(st.sampled_from(("replace", "replace", "remove", "add", "bury", "repeat"))):
        case "remove":
            del node[last]
        case "add" if isinstance(node, dict):
            key = draw(st.sampled_from(("name", "gpu", "x" * 300, "\x1b[31m", "value")))
            node[key] = draw(trees)
        case "bury":
            for _ in range(draw(st.sampled_from((1, 5, 40, 400)))):
                node[last] = [node[last]]
        case "repeat" if isinstance(node, list):
            node.extend([node[last]] * 3)
        case _:
            node[last] = draw(trees)
    return tree


@st.composite
def bytewise(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes flipped, removed, repeated or put in; or the end is missing."""
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.sampled_from((1, 3, 20, 200))))
    match draw(st.sampled_from(("cut", "flip", "remove", "repeat", "put in"))):
        case "cut":
            return data[:start]
        case "flip":
            piece = bytes(byte ^ draw(st.sampled_from((1, 16, 128))) for byte in data[start:end])
        case "remove":
            piece = b""
        case "repeat":
            piece = data[start:end] * 50
        case _:
            junk = st.sampled_from([*NUMBERS, *TEXTS, '"', "]", "}", "=", "'''", "\ufeff"])
            piece = draw(junk).encode("utf-8", "surrogatepass")
    return data[:start] + piece + data[end:]


def as_toml(tree: Any) -> bytes:
    """The tree as TOML, as far as TOML can say it."""
    try:
        stated = json.loads(json.dumps(tree), object_hook=lambda one: {
            key: node for key, node in one.items() if node is not None
        })  # fmt: skip
        return tomlkit.dumps(stated).encode("utf-8", "surrogatepass")
    except (ValueError, TypeError, AttributeError, RecursionError):
        lines = (f"{key} = {as_json(node).decode()}\n" for key, node in tree.items())
        return "".join(lines).encode("utf-8", "surrogatepass")


def as_json(tree: Any) -> bytes:
    """The tree as JSON, nested however deeply."""
    try:
        return json.dumps(tree, default=str).encode()
    except RecursionError:
        return b"[" * 100_000


def malformed(tree: Any, write: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    """The file of a tree with a value changed, or with bytes changed."""
    return changed(tree).map(write) | st.deferred(lambda: bytewise(write(tree)))


# --- files of every kind -------------------------------------------------------------------------


@cache
def catalog(kind: str) -> tuple[dict[str, Any], ...]:
    """The entries of the catalog of one kind."""
    files = sorted((ROOT / "co2sim/catalog" / kind).glob("*.toml"))
    return tuple(tomllib.loads(path.read_text("utf-8")) for path in files)


EXAMPLE = tomllib.loads((ROOT / "examples/my-cluster.toml").read_text("utf-8"))
GPU = tomllib.loads((ROOT / "examples/my-gpu.toml").read_text("utf-8"))
MODEL = (ROOT / "co2sim/catalog/models/tiny-5m.toml").read_bytes()
TIERED = EXAMPLE | {"fabric": {"leaf": {"nodes": 4, "oversubscription": 2}}}
TABLE = b"""\
method,network,tau,gpus,words_per_s,scalability_16_to_128,note
adamw_zero2,80 Gbit/s TCP/IP,,8,18444,,single node: no inter-node traffic
adamw_zero2,80 Gbit/s TCP/IP,,16,3488,,
"""
HUGGING_FACE = tuple(json.loads((DATA / "huggingface-small.json").read_text("utf-8"))["files"])
ONE_SAMPLE = ["--micro-batch", "1", "--accumulation", "1"]
COMMANDS = (
    ["run", *ONE_SAMPLE], ["run", "--json"], ["show"],
    ["run", "--tokens", "1e9", "--accumulation", "2"],
)  # fmt: skip
asked = st.builds(lambda command, text: [*command, "-s", text], st.sampled_from(COMMANDS),
                  st.sampled_from(VARIANTS))  # fmt: skip
SMALL = ["-m", "small.toml", "-g", "4"]
KNOWN = {
    "": (*catalog("clusters"), EXAMPLE, TIERED),
    "gpu": (*catalog("gpus"), GPU),
    "model": catalog("models"),
}
"""Trees, by what `--set` calls their values with in front."""
PATHS = [
    *("grid", "spares", "gpu.curve.\u0663", "gpu.curve.99"),
    *(".".join((of, *map(str, path)))
      for of, trees_ in KNOWN.items() for tree in trees_ for path in places(tree)),
]  # fmt: skip


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """An option `--set` with any path and any value, mostly with the unit that it has."""
    path = draw(st.sampled_from(PATHS))
    unit = "FLOP/s" if ".peak." in path else UNITS_OF.get(path.rpartition(".")[2], "")
    usual = st.sampled_from(("1", "0.5", "4", "1e-6", "1e9", *NUMBERS)).map(lambda n: f"{n} {unit}")
    value = draw(st.one_of(usual, usual, usual, numbers, st.sampled_from(TEXTS)))
    return ["--set", f"{path.strip('.')}={value}".replace("\0", "")]


STUDIES = [
    f"run -g 8 {' '.join(ONE_SAMPLE)} --seed 1",
    "scale -g 2,4,8",
    "sweep --vary 'inter.bandwidth=1 GB/s,2 GB/s' -g 8 --jobs 1",
    "solve inter.bandwidth --for efficiency=90% -g 8",
    "plan --tokens 1e9 -g 8 --jobs 1",
    "goodput -g 8 --set failures=meta-rsc-1",
    "own -g 8 --years 3 --utilization 70% --set 'own.node=36000 USD'",
]


# --- kinds of input: a command or a reader, its words, and files ---------------------------------

Input = tuple[Callable[[], object], list[str], Files]


CLUSTER = as_toml(EXAMPLE | {"gpu": "gpu.toml"})
BUILT = {"small.toml": MODEL, "gpu.toml": as_toml(GPU), "cluster.toml": CLUSTER}
MADE: dict[str, tuple[tuple[dict[str, Any], ...], str, list[str]]] = {
    "cluster": (KNOWN[""], "cluster.toml", ["-c", "cluster.toml", *SMALL]),
    "GPU": (KNOWN["gpu"], "gpu.toml", ["-c", "cluster.toml", *SMALL]),
    "model": (KNOWN["model"], "small.toml", ["-c", "dgx-h100", *SMALL]),
    "configuration": (HUGGING_FACE, "hf/config.json", ["-c", "dgx-h100", "-m", "hf", "-g", "8"]),
}
"""From which trees, into which file, and the words that use it."""


@st.composite
def made(draw: st.DrawFn, kind: str) -> Input:
    """A cluster, a GPU beside it, a model, or a `config.json` of Hugging Face."""
    trees, name, words = MADE[kind]
    write = as_json if name.endswith(".json") else as_toml
    data = draw(malformed(draw(st.sampled_from(trees)), write))
    return co2sim, [*draw(asked), *words], BUILT | {name: data}


@st.composite
def option(draw: st.DrawFn) -> Input:
    """Any value set to any path."""
    files = {"cluster.toml": as_toml(draw(st.sampled_from((EXAMPLE, TIERED)))), "small.toml": MODEL}
    sets = draw(overrides()) + (draw(overrides()) if draw(st.booleans()) else [])
    return co2sim, [*draw(asked), "-c", "cluster.toml", *SMALL, *sets], files


@st.composite
def word(draw: st.DrawFn) -> Input:
    """An odd word in the place of any behind the command, or of what follows its `=`."""
    study = draw(st.sampled_from(STUDIES))
    words = shlex.split(f"{study} -c dgx-h100 -m small.toml -s co2.published:tau=2")
    at = draw(st.integers(1, len(words) - 1))
    key, equals, _ = words[at].rpartition("=")
    odd = draw(st.sampled_from([*NUMBERS, *TEXTS]) | numbers)
    words[at] = f"{key}{equals}{odd}".replace("\0", "")
    return co2sim, words, {"small.toml": MODEL}


@st.composite
def published(draw: st.DrawFn) -> Input:
    """Published cells, and how a paper says that they are simulated."""
    folder = ROOT / "papers" / draw(st.sampled_from(("co2", "zeropp")))
    trees = {n: tomllib.loads((folder / n).read_text()) for n in ("results.toml", "paper.toml")}
    trees["results.toml"]["cell"] = trees["results.toml"]["cell"][:3]
    files = {name: as_toml(tree) for name, tree in trees.items()}
    name = draw(st.sampled_from(sorted(files)))
    files[name] = draw(malformed(trees[name], as_toml))
    return lambda: read_speeds(Path("results.toml")), [], files


@st.composite
def table(draw: st.DrawFn) -> Input:
    """A CSV file of results."""
    return lambda: from_csv(Path("cells.csv"), "check"), [], {"cells.csv": draw(bytewise(TABLE))}


@st.composite
def run(draw: st.DrawFn) -> Input:
    """A measured run: its record, or a line of its trace."""
    record_, trace = recorded_run()
    if draw(st.booleans()):
        record_ = draw(malformed(json.loads(record_), as_json))
    else:
        lines = trace.splitlines()
        at = draw(st.integers(0, len(lines) - 1))
        change = malformed(json.loads(lines[at]), as_json).map(lambda one: [one])
        lines[at : at + 1] = draw(st.sampled_from(([], [lines[at]] * 2)) | change)
        trace = b"\n".join(lines)
    files = {"run/run.json": record_, "run/trace.jsonl": trace}
    return co2analysis, ["compare", "run", *draw(st.sampled_from(([], ["--json"])))], files


KINDS: dict[str, st.SearchStrategy[Input]] = {
    **{kind: made(kind) for kind in MADE},
    "option": option(),
    "word": word(),
    "published": published(),
    "table": table(),
    "run": run(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_input_is_answered_or_refused_with_one_line(kind: str) -> None:
    """Some of every kind is refused, so that something is tried."""
    codes = set()

    @given(KINDS[kind])
    def tried(made: Input) -> None:
        codes.add(judged(*made))

    tried()
    assert 2 in codes
