"""A state as two files: its tensors in the format of safetensors, and all else as JSON.

Other tools read them, too. They are written and read here, byte for byte as the library does, but
without its copies of all tensors: these take longer than the disk, or than a checksum.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from realrun.errors import CheckpointError
from realrun.train.manifest import Reading

_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How the format calls each dtype, in the order in which a file holds them: each is aligned."""

_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

_MOST_HEADER = 16_000_000
"""Bytes, some 150 for each tensor; the library reads six times as many, whose parse takes 2 GB."""


def split(value: Any, name: str, named: dict[str, Tensor]) -> Any:
    """The value as JSON can hold it; its tensors go into `named`.

    Raises CheckpointError for what is no mapping, list, tuple, tensor, number, text or None.
    """
    if isinstance(value, Tensor):
        unique = f"{len(named)}{name}"
        named[unique] = value.detach()
        return {"tensor": unique}
    if isinstance(value, Mapping):
        return {"map": [[key, split(one, f"{name}/{key}", named)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        items = [split(one, f"{name}/{at}", named) for at, one in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{name.lstrip('/')} is a {type(value).__name__}: it cannot be saved")


def join(value: Any, named: Mapping[str, Tensor]) -> Any:
    """The other way round. Raises KeyError, TypeError or ValueError for what `split` never gave."""
    if isinstance(value, list):
        return [join(one, named) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, found),) = value.items()
    if kind == "map":
        return {key: join(one, named) for key, one in found}
    if kind == "tuple":
        return tuple(join(one, named) for one in found)
    return {"tensor": named}[kind][found]


def tensor_parts(named: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """The parts of a file with these tensors, one after the other: a header, then their bytes."""
    held = {name: tensor.cpu().contiguous() for name, tensor in named.items()}
    for name, tensor in held.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name} is of {tensor.dtype}, which cannot be saved")
    order = sorted(held, key=lambda name: (list(_NAMES).index(held[name].dtype), name))
    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    end = 0
    for name in order:
        tensor = held[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *parts]


def read_tensors(file: Reading) -> dict[str, Tensor]:
    """The tensors of a file; not to be used before its checksum was compared.

    Raises ValueError if it is none: every byte must belong to one tensor, as in the library.
    """
    length = int.from_bytes(file.take(8), "little")
    first = 8 + length
    if length > _MOST_HEADER or first > file.size:
        raise ValueError(f"its header has {length} bytes")
    try:
        rows = sorted(_row(*one) for one in json.loads(file.take(length)).items())
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its header is not that of tensors") from error
    ends = [0, *(end for _, end, *_ in rows)]
    if [begin for begin, *_ in rows] != ends[:-1] or ends[-1] != file.size - first:
        raise ValueError("its tensors do not fill it")
    found: dict[str, Tensor] = {}
    for *_, name, dtype, shape in rows:
        try:
            found[name] = torch.empty(shape, dtype=_DTYPES[dtype])
        except (RuntimeError, OverflowError, TypeError) as error:  # empty, but of a huge shape
            raise ValueError(f"tensor {name} is too large") from error
        file.fill(found[name].reshape(-1).view(torch.uint8).numpy().data)
    return found


def _row(name: str, one: Mapping[str, Any]) -> tuple[int, int, str, str, list[int]]:
    """Where a tensor is, its name, dtype and shape. Raises ValueError if these do not fit."""
    (begin, end), shape, dtype = one["data_offsets"], one["shape"], one["dtype"]
    whole = all(type(number) is int and number >= 0 for number in (begin, end, *shape))
    if not whole or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise ValueError(f"tensor {name} has another size")
    return begin, end, name, dtype, list(shape)
