"""What an HTML page says, and what it holds for its script and to be saved."""

import base64
import hashlib
import json
import re
from html import unescape
from typing import Any


def held(text: str, name: str) -> Any:
    """Data that a page holds for its script."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def drawn_points(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of all layers of a chart."""
    names = [(layer.get("data") or spec["data"])["name"] for layer in spec["layer"]]
    return [point for name in names for point in spec["datasets"][name]]


def files(text: str) -> dict[str, bytes]:
    """The files inside of a page, by name."""
    links = re.findall(r'download="([^"]+)" href="data:[^;]+;base64,([^"]+)"', text)
    return {name: base64.b64decode(content) for name, content in links}


def heading(text: str) -> str:
    """The answer."""
    (answer,) = re.findall(r"<h1>(.*?)</h1>", text)
    return _plain(answer)


def first_screen(text: str) -> str:
    """What a reader sees before any click: the answer, its named lines and the first chart."""
    head = text.partition("<header>")[2].partition("</header>")[0]
    return _plain(re.sub(r"<details>.*?</details>", "", head, flags=re.DOTALL))


def _plain(text: str) -> str:
    return unescape(text).replace("\N{NO-BREAK SPACE}", " ")


def policy_of(text: str) -> tuple[str, list[str]]:
    """The content security policy of a page, and the hash of each of its scripts."""
    (policy,) = re.findall(r'Security-Policy" content="([^"]+)"', text)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()) for one in scripts)
    return unescape(policy), [f"'sha256-{digest.decode()}'" for digest in digests]


def loads(text: str) -> bool:
    """Whether a page loads anything, its scripts aside, or leads anywhere but to itself."""
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    return bool(re.search(r'(?:src|href)="(?!data:|#)|@import', outside))
