"""A part of `make lint`: proselint on pages, and our vocabulary on these and on texts of the code.

Pages are README, CONTRIBUTING and docs/, outside of code. Texts of the code are the docstrings and
strings of four words or more: messages, helps, reports. Prints a line for each finding, and one if
the packages bind more names that say nothing than VAGUE_NAMES.
"""

import ast
import re
import sys
from collections.abc import Iterator

from proselint.checks import __register__ as every
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, types
from proselint.tools import LintFile
from size import PACKAGES, ROOT, VAGUE, vague_names

VAGUE_NAMES = 150
"""The most that there may be of the names in `.ci/size.py`; it only falls."""
_OFF = ("typography", "lexical_illusions", "misc.phrasal_adjectives", "spelling", "annotations")
"""Checks that mistake code, numbers or names for prose."""
_CODE = re.compile(r"(?ms)^```.*?^```$|^\|.*?$|<!--.*?-->|`[^`\n]*`|\]\([^)\n]*\)")
_WORDS = 4


def vocabulary() -> dict[str, str]:
    """Phrases, and better ones."""
    lines = (ROOT / ".ci" / "vocabulary.txt").read_text().splitlines()
    return dict(line.split(" = ") for line in lines if line and not line.startswith("#"))


def pages() -> Iterator[tuple[str, int, str]]:
    """Where a text begins, and the text: of Markdown, with code blanked."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]:
        blank = _CODE.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), page.read_text())
        yield str(page.relative_to(ROOT)), 1, blank


def strings() -> Iterator[tuple[str, int, str]]:
    """The same of Python: docstrings and strings of some words; parts of an f-string are joined."""
    for file in sorted(path for one in PACKAGES for path in (ROOT / one).rglob("*.py")):
        tree = ast.parse(file.read_text())
        joined = [one for one in ast.walk(tree) if isinstance(one, ast.JoinedStr)]
        inner = {id(part) for one in joined for part in one.values}
        for node in ast.walk(tree):
            text = _text(node) if id(node) not in inner else ""
            if len(text.split()) >= _WORDS:
                whole = text.encode(errors="replace").decode()  # without surrogates
                yield str(file.relative_to(ROOT)), getattr(node, "lineno", 1), whole


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = node.values
        return "".join(_text(part) if isinstance(part, ast.Constant) else "0" for part in parts)
    return ""


def main() -> int:
    """Print all findings; 1 if there are any."""
    own = Check(
        types.PreferredFormsSimple(items=vocabulary()),
        path="vocabulary",
        message="'{}' is better than '{}'.",
    )
    CheckRegistry().register_many((*every, own))
    wanted = {"vocabulary": True} | dict.fromkeys(_OFF, False)  # the first that fits a name counts
    wanted |= {name: on for name, on in DEFAULT["checks"].items() if name not in wanted}
    count = 0
    for texts, checks in ((pages(), wanted), (strings(), {"vocabulary": True})):
        for where, first, text in texts:
            for found in LintFile(source=where, content=text).lint({**DEFAULT, "checks": checks}):
                line = first + found.pos[0] - 1
                print(f"{where}:{line}: {found.check_result.message}")
                count += 1
    if (names := vague_names(ROOT)) > VAGUE_NAMES:
        print(f"{names} values are called {', '.join(VAGUE)}: at most {VAGUE_NAMES} may be")
        count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
