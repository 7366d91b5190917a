"""What every page has: escaped texts, data inside, and a policy that lets only its scripts run."""

import base64
import hashlib
import json
from collections.abc import Iterable
from importlib import resources

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_PACKAGE = "co2sim.report"


def environment(*packages: str) -> Environment:
    """Templates of these packages, and those that all pages share."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in (*packages, _PACKAGE)]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["data"] = data
    return made


def data(value: object) -> Markup:
    """JSON inside of a script element, which nothing in a text can end."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped above


def policy(scripts: Iterable[str], *more: str) -> str:
    """A content security policy: these scripts, and nothing from anywhere else but `more`."""
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]
    rules = [
        "default-src 'none'",
        " ".join(["script-src", *(hashes or ["'none'"])]),
        "style-src 'unsafe-inline'",
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
        *more,
    ]
    return "; ".join(rules)


def link(kind: str, content: str) -> str:
    """A file as an address that holds it."""
    return f"data:{kind};base64,{base64.b64encode(content.encode()).decode()}"


def asset(name: str, package: str = _PACKAGE) -> Markup:
    """A script or style of ours, which is no text of anybody else."""
    found = (resources.files(package) / "templates" / name).read_text("utf-8")
    return Markup(found)  # noqa: S704 - ours
