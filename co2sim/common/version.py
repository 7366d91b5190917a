"""Which co2sim computes: results of two machines can be one table only where it is the same."""

import sys
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

_SHOWN = 12
"""Characters of the hash of the source: enough to tell two apart."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Versions of co2sim, of Python and of NumPy; `source` is a hash of all files of co2sim."""

    version: str
    source: str
    python: str
    numpy: str

    def __str__(self) -> str:
        source = self.source[:_SHOWN]
        return f"co2sim {self.version} ({source}), Python {self.python}, NumPy {self.numpy}"


@cache
def own_identity() -> Identity:
    """Of this process. Versions alone do not do: between tags, and in a checkout, they repeat."""
    from importlib.metadata import version  # noqa: PLC0415 - time that few commands need

    folder = Path(__file__).parents[1]
    digest = sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".py", ".toml"}:
            content = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            digest.update(f"{name} {len(content)}\n".encode() + content)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Identity(own_version(), digest.hexdigest(), python, version("numpy"))


def own_version() -> str:
    """The version; "not installed" for a copy of the files that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - as above

    try:
        return version("co2sim-training")  # on the package index, co2sim is another project
    except PackageNotFoundError:
        return "not installed"
