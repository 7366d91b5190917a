"""TOML and JSON from others: not too large, not nested too deeply, without control characters.

All functions raise ValueError, with words to put behind the name of the file, for what cannot be
read. Control characters in texts become escapes, wherever they are shown later.
"""

import json
import re
import tomllib
from typing import Any, NoReturn

from co2sim.visible import has_control, visible

MOST_TOML_BYTES = 1_000_000
"""A hundred times the largest of the catalog."""
_DEEPEST = 32
"""Tables in tables: several times what any cluster, model or record has."""
_MOST_DIGITS = 300
"""Of a whole number: more than a float can hold is no number of any of our files."""

_LEXEMES = re.compile(
    r'"""(?:[^\\"]++|\\.|"(?!""))*+(?:"{3,5})?+|'
    r"'''(?:[^']++|'(?!''))*+(?:'{3,5})?+|"
    r'"(?:[^\\"\n]++|\\.)*+"?+|'
    r"'[^'\n]*+'?+|"
    r"\#[^\n]*+|(?P<open>[\[{])|(?P<close>[\]}])|(?P<dot>\.)|(?P<end>[\n=,])",
    re.DOTALL,
)
"""The parts of TOML that say how deep it is; texts and comments may hold any brackets and dots.

A text that is not closed is one all the same, as far as it could go: nothing is read twice.
"""


def toml(text: str) -> dict[str, Any]:
    """A document in TOML."""
    if len(text) > MOST_TOML_BYTES:
        raise ValueError(f"it is larger than {MOST_TOML_BYTES / 10**6:g} MB")
    _check_depth_of_toml(text)
    try:
        tree = tomllib.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    return _cleaned(tree)  # type: ignore[no-any-return]


def json_tree(text: str) -> Any:
    """A document in JSON; a name that an object has twice is refused, as in TOML."""
    try:
        tree = json.loads(text, object_pairs_hook=_once, parse_int=_whole)
    except RecursionError as error:
        raise _too_deep() from error
    _check_depth(tree)
    return _cleaned(tree)


def json_line(text: str) -> Any:
    """A line of a file of JSON Lines, of which there may be millions: as `json_tree`."""
    if text.count("[") + text.count("{") > 2 or "\\" in text or has_control(text):  # noqa: PLR2004
        return json_tree(text)
    return json.loads(text, parse_int=_whole)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in pairs:
        if name in tree:
            raise ValueError(f"{name!r} is given twice")
        tree[name] = value
    return tree


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; at most {_MOST_DIGITS} are read")
    return int(digits)


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {_DEEPEST} levels deep")


def _check_depth(tree: Any) -> None:
    """Level by level, so that no depth is too much for this check."""
    level = [tree]
    for _ in range(_DEEPEST):
        level = [
            inner
            for node in level
            if isinstance(node, dict | list)
            for inner in (node.values() if isinstance(node, dict) else node)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


def _check_depth_of_toml(text: str) -> None:
    """Brackets in brackets, and names with many dots, before they are read at great cost."""
    depth = dots = 0
    for found in _LEXEMES.finditer(text):
        match found.lastgroup:
            case "open":
                depth += 1
            case "close":
                depth -= 1
            case "dot":
                dots += 1
            case "end":
                dots = 0
        if depth > _DEEPEST or dots > _DEEPEST:
            raise _too_deep()


def _cleaned(node: Any) -> Any:
    """The same with visible texts and names, and whole numbers that a float can hold."""
    if isinstance(node, str):
        return visible(node)
    if isinstance(node, dict):
        return {visible(name): _cleaned(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_cleaned(item) for item in node]
    if isinstance(node, int) and not isinstance(node, bool) and abs(node) >= 10**_MOST_DIGITS:
        _refuse_number()
    return node


def _refuse_number() -> NoReturn:
    raise ValueError(f"a number has more than {_MOST_DIGITS} digits")
