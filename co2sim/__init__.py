"""Simulate how distributed training scales: CO2, ZeRO++, ZeRO, DDP and the local-update family.

`simulate` answers one question, `sweep` and `scale` many. Names are loaded when they are first
used, so that `import co2sim` costs next to nothing: `__init__.pyi` says which, and from where.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_MODULES = {
    name.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for name in node.names
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module(f"{__name__}.common.version").own_version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
