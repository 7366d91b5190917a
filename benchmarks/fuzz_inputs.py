"""Inputs that nobody means well: files of every kind, changed in bytes and in values, and options.

An input is drawn by Hypothesis, so that a seed says which; `make` writes its files into a folder.
"""

import copy
import json
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import tomlkit
from hypothesis import strategies as st

Tree: TypeAlias = dict[str, Any]
ROOT = Path(__file__).parent.parent
CATALOG = ROOT / "co2sim" / "catalog"

NUMBERS = (
    *("5e-324", "-5e-324", "1e308", "1.7976931348623157e308", "1e309", "-0.0", "0", "-1", "1", "2"),
    *("nan", "inf", "-inf", "NaN", "Infinity", "1e-300", "1e-30", "1e30", "1e100", "9" * 400, "3"),
    *("9" * 5000, "1" + "0" * 18, "1e18", "0x10", "1_000", "1,5", "1e", "0.1", "0.999999999999"),
    *("\u0663", "\uff11\uff12", "\u00bd", "\u00b2", "12.5", "1e6", "1e9", "1e12", "7", "1000000"),
)
UNITS = (
    *(
        "",
        "Gbit/s",
        "GB/s",
        "B/s",
        "bit/s",
        "B",
        "GB",
        "TiB",
        "us",
        "s",
        "h",
        "years",
        "FLOP",
        "Pbit",
    ),
    *("TFLOP/s", "FLOP/s", "W", "MW", "USD/h", "EUR/h", "g/kWh", "kg/kWh", "dimensionless", "%"),
)
TEXTS = (
    *("", " ", "true", "[]", "{}", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\u202eabc", "a\nb"),
    *("\x00", "\ud800", "x" * 100_000, "[" * 3000, "../../etc/passwd", "/dev/zero", "/etc/passwd"),
    *("h100", "a100-40", "virtual", "nccl", "gloo", "meta-rsc-1", "france", "h100-median-2026-05"),
    *(
        '"' + '\\"' * 40_000,
        "1" * 30_000 + "\n\nx",
        "1 " + "a" * 30_000,
        "1 a" + " " * 30_000 + "a",
    ),
    *("gpu.toml", ".", "..", "~", "a=b", "%s%n", "${HOME}", "`id`", "\u0000\u0001\u0002", "\r\n"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 10**18, 10**400, -(10**30), 5e-324, 1e308, -0.0, 0.5, 1.5),
    *(float("nan"), float("inf"), float("-inf"), "", "x", [], [[]], [1.5], {}, {"value": 1}),
    *([{"flops": "1 GFLOP", "value": 0.5}, 1.5], {"value": {}}, {"value": "1", "source": 3}),
    *({"a": {"b": {"c": {}}}}, [None], [True], [{}], ["a", 1], {"": ""}, {"\x1b": "\x1b"}),
)
"""Put in the place of any value of a tree."""

STRATEGIES = (
    *("ddp", "zero1", "zero2", "zero3", "zeropp", "fsdp", "local_sgd:tau=3", "slowmo:tau=2"),
    *("diloco:tau=4,fragments=2,delay=1", "co2:tau=2,worker=node", "co2:tau=4,delay=auto"),
    *("overlap_local_sgd:tau=3", "zero2:owners=true,bucket=8388608", "co2(tau=48, staleness=2)"),
)


@dataclass(frozen=True)
class Fuzzed:
    """One input: what kind of thing is changed, and the seed of its changes.

    `values` are values and texts that Hypothesis made.
    """

    kind: str
    seed: int
    values: tuple[Any, ...]


@dataclass
class Made:
    """The files of an input by name, and the words that use them."""

    files: dict[str, bytes] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.binary(max_size=4),
)
_TREES = st.recursive(
    _LEAVES.filter(lambda leaf: not isinstance(leaf, bytes)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=5,
)


def values() -> st.SearchStrategy[tuple[Any, ...]]:
    """A few values and trees of any type."""
    return st.lists(_TREES, min_size=1, max_size=3).map(tuple)


def number(rng: random.Random) -> str:
    """A number with or without a unit, or another text."""
    if rng.random() < 0.2:  # noqa: PLR2004 - one in five
        return rng.choice(TEXTS)
    usual = f"{10 ** rng.uniform(-6, 9):.3g}"
    unit = rng.choice(UNITS)
    return f"{rng.choice([usual, rng.choice(NUMBERS)])}{rng.choice(['', ' '])}{unit}"


def value(rng: random.Random, drawn: tuple[Any, ...]) -> Any:
    """A value of any type."""
    return copy.deepcopy(
        rng.choice([number, lambda r: r.choice(VALUES), lambda r: r.choice(drawn)])(rng)
    )


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values of a tree."""
    for key, node in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(node, dict | list):
            yield from places(node, (*path, key))


def _deep(tree: Any) -> bool:
    """Whether it is nested more deeply than Python's own functions can follow."""
    try:
        json.dumps(tree, default=str)
        copy.deepcopy(tree)
    except RecursionError:
        return True
    return False


def changed(tree: Any, rng: random.Random, drawn: tuple[Any, ...]) -> Any:
    """The tree with a few values replaced, removed, added, repeated or buried."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        found = [] if _deep(tree) else list(places(tree))
        if not found:
            return tree
        *parents, last = rng.choice(found)
        node = tree
        for key in parents:
            node = node[key]
        match rng.randrange(8):
            case 0:
                del node[last]
            case 1 if isinstance(node, dict):
                node[rng.choice(["name", "gpu", "x" * 300, "\x1b[31m", "value"])] = value(
                    rng, drawn
                )
            case 1:
                node.append(value(rng, drawn))
            case 2:
                for _ in range(rng.choice((1, 5, 40, 400))):
                    node[last] = [node[last]] if rng.random() < 0.5 else {"a": node[last]}  # noqa: PLR2004
            case 3 if isinstance(node, list):
                node.extend(copy.deepcopy(node[last]) for _ in range(3))
            case _:
                node[last] = value(rng, drawn)
    return tree


def bytewise(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, removed, repeated, or put in; or the end is missing."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        until = min(len(data), at + rng.choice((1, 1, 3, 20, 200)))
        match rng.randrange(7):
            case 0:
                data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[until:]
            case 2:
                data = data[:until] + data[at:until] * rng.choice((1, 2, 50)) + data[until:]
            case 3:
                data = data[:at]
            case 4:
                junk = rng.choice([*NUMBERS, *TEXTS, '"', "]", "}", "=", "#", "'''", "\ufeff"])
                data = data[:at] + junk.encode("utf-8", "surrogatepass") + data[at:]
            case 5:
                swapped = bytearray(data)
                for place in range(at, until):
                    swapped[place] ^= 1 << rng.randrange(8)
                data = bytes(swapped)
            case _:
                spots = [place for place, byte in enumerate(data) if 48 <= byte <= 57]  # noqa: PLR2004
                if spots:
                    spot = rng.choice(spots)
                    data = data[:spot] + rng.choice(NUMBERS).encode() + data[spot + 1 :]
    return data


def as_toml(tree: Tree) -> bytes:
    """The tree as TOML, as far as TOML can say it."""
    try:
        return tomlkit.dumps(_without_none(tree)).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b"a = " + b"[" * 100_000
    except (ValueError, TypeError, AttributeError):
        return b"".join(
            f"{key} = {json.dumps(node, default=str)}\n".encode() for key, node in tree.items()
        )


def _without_none(node: Any) -> Any:
    if isinstance(node, dict):
        return {k: _without_none(v) for k, v in node.items() if v is not None}
    return [_without_none(v) for v in node if v is not None] if isinstance(node, list) else node


def as_json(tree: Any) -> bytes:
    """The tree as JSON, nested however deeply."""
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return b"[" * 100_000


def mutated(
    tree: Tree, rng: random.Random, drawn: tuple[Any, ...], write: Callable[[Any], bytes]
) -> bytes:
    """The tree with values changed, or its text with bytes changed, or both."""
    way = rng.randrange(4)
    text = write(tree if way == 0 else changed(tree, rng, drawn))
    return bytewise(text, rng) if way in {0, 1} else text


@cache
def catalog(kind: str) -> tuple[Tree, ...]:
    """The entries of the catalog of one kind, and the examples."""
    files = [*sorted((CATALOG / kind).glob("*.toml"))]
    files += {"clusters": [ROOT / "examples" / "my-cluster.toml"]}.get(kind, [])
    return tuple(tomllib.loads(path.read_text("utf-8")) for path in files)


HF: Mapping[str, Tree] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64,
             "vocab_size": 100, "resid_pdrop": 0.1},
    "llama": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 128,
              "vocab_size": 100, "max_position_embeddings": 64, "tie_word_embeddings": False},
    "vit": {"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 2, "intermediate_size": 128, "image_size": 32, "patch_size": 8,
            "id2label": {"0": "cat", "1": "dog"}},
    "gemma2": {"model_type": "gemma2", "hidden_size": 64, "num_attention_heads": 4,
               "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 100, "head_dim": 16,
               "max_position_embeddings": 64, "sliding_window": 64,
               "layer_types": ["full_attention", "sliding_attention"]},
}  # fmt: skip
"""Small configurations of Hugging Face."""
