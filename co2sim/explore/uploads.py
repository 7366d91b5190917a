"""Files of users that a page of `co2sim explore` is given: their names, and how they are kept."""

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from co2sim.errors import OptionError
from co2sim.explore.asking import Text
from co2sim.visible import given

_NAME = re.compile(r"[\w][\w .()+-]{0,99}\.(toml|json)")
_MOST_BYTES = 255
"""Of a name in UTF-8, on nearly all file systems."""


class Upload(BaseModel):
    """A file of a user: a cluster or a model, as TOML, or the config.json of a model."""

    model_config = ConfigDict(extra="forbid")

    kind: Text
    name: Text
    text: str


def checked_name(upload: Upload) -> str:
    """The name of the file, without folders. Raises OptionError if it or the kind is none."""
    name = Path(upload.name).name
    if not _NAME.fullmatch(name):
        raise OptionError(f"{given(name)} is no name for a file; it must end in .toml or .json")
    size = len(name.encode())
    if size > _MOST_BYTES:
        raise OptionError(f"{given(name)} has {size} bytes; at most {_MOST_BYTES} are allowed")
    if upload.kind not in {"cluster", "model"}:
        raise OptionError(f"kind is {given(upload.kind)}; it must be cluster or model")
    return name


def kept(upload: Upload, name: str, folder: Path) -> Path:
    """Write the file below `folder`, which is new. Raises OptionError, without paths."""
    path = folder / Path(name).stem / name  # config.json has no name of its own
    try:
        path.parent.mkdir(parents=True)
        path.write_text(upload.text, "utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError(f"{given(name)} cannot be kept: {reason.lower()}") from None
    return path
