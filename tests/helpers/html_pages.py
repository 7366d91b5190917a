"""What an HTML page holds for its script."""

import json
import re
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
