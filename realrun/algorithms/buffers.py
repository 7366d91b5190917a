"""What is averaged besides the parameters: buffers, other modules, and frozen weights that moved.

Tensors of any layout are sent and averaged by their `Parts`, plain tensors that share their memory.
A rank describes each tensor by its name, and the ranks compare what they describe:

- a tensor that is equal on all ranks stays as it is, bit for bit: no arithmetic touches a mask;
- numbers with a point become their mean. An element that is NaN or infinite on some ranks only is
  the mean over the other ranks, with a warning;
- whole numbers and flags become those of the first rank, and so do the vectors of a spectral norm,
  which belong together;
- a tensor that not all ranks have, or that differs in shape, type or structure, stays each rank's
  own, with a warning.

A rank without data in `join` gives nothing, and gets what the others have.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from co2sim.common.errors import OptionError
from realrun.algorithms.flat_parameters import keeps_elements_elsewhere
from realrun.algorithms.outer_loop import mark_of
from realrun.algorithms.process_groups import WorkerGroups

_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The tensors that a sparse one consists of; the last one holds its values."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Plain tensors that share memory with a tensor, each element of memory once.

    `structure` must be equal on ranks that average `values`. `copied`: the structure does not share
    memory, so that it can be read but not written. `kind` describes layout, shapes and types.
    """

    kind: str
    values: tuple[Tensor, ...] = ()
    structure: tuple[Tensor, ...] = ()
    copied: bool = False
    opaque: bool = False
    """Nothing can be read: a subclass of Tensor that does not tell what it consists of."""

    @property
    def all(self) -> tuple[Tensor, ...]:
        """All that can be read."""
        return (*self.structure, *self.values)


def parts_of(tensor: Tensor) -> Parts:
    """The parts of a tensor of any class, layout and type, as far as they can be read."""
    if is_lazy(tensor):
        return Parts("not initialized")
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - no public name
        kind = f"{tuple(tensor.shape) if not tensor.is_nested else 'nested'} {_name(tensor.dtype)}"
        if isinstance(tensor, DTensor):
            inside = parts_of(tensor.to_local())
            kind = f"{kind} {tensor.placements}"
            return Parts(kind, inside.values, inside.structure, inside.copied, inside.opaque)
        if keeps_elements_elsewhere(tensor):
            return _parts_of_wrapper(tensor, kind)
        if tensor.is_meta:
            return Parts(f"{kind} on meta")
        return _parts_of_plain(tensor.detach(), kind)


def _parts_of_plain(tensor: Tensor, kind: str) -> Parts:
    if names := _SPARSE.get(tensor.layout):
        *structure, values = (_once(getattr(tensor, name)()) for name in names)
        shapes = ", ".join(str(tuple(part.shape)) for part in (*structure, values))
        return Parts(f"{kind} {_name(tensor.layout)} {shapes}", (values,), tuple(structure))
    if tensor.is_quantized:
        return _parts_of_quantized(tensor, kind)
    if tensor.layout != torch.strided or tensor.is_nested:
        return Parts(f"{kind} {_name(tensor.layout)}", opaque=True)
    once = _once(tensor)
    if once.shape != tensor.shape:
        kind = f"{kind} expanded from {tuple(once.shape)}"
    if _is_packed(tensor.dtype):
        return Parts(kind, structure=(once.view(torch.uint8),))
    return Parts(kind, (once,))


def _parts_of_wrapper(tensor: Tensor, kind: str) -> Parts:
    """Those of the tensors that a subclass says it consists of: codes and scales, for example."""
    kind = f"{kind} {type(tensor).__name__}"
    if not hasattr(tensor, "__tensor_flatten__"):
        return Parts(kind, opaque=True)
    names, _ = tensor.__tensor_flatten__()
    inside = [parts_of(getattr(tensor, name)) for name in names]
    return Parts(
        f"{kind} of {', '.join(part.kind for part in inside)}",
        structure=tuple(each for part in inside for each in (*part.structure, *part.values)),
        copied=any(part.copied for part in inside),
        opaque=any(part.opaque for part in inside),
    )


def _parts_of_quantized(tensor: Tensor, kind: str) -> Parts:
    codes = tensor.int_repr()
    if tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
        numbers = [tensor.q_scale(), tensor.q_zero_point()]
        scales = [torch.tensor(numbers, dtype=torch.float64, device=codes.device)]
    else:
        scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return Parts(kind, structure=(codes, *scales), copied=True)


def _once(tensor: Tensor) -> Tensor:
    """A view of a strided tensor without the dimensions along which it repeats its memory."""
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if not stride and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    strides = [
        1 if size == 1 else stride
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ]
    return tensor.as_strided(tensor.shape, strides)


def _is_packed(dtype: torch.dtype) -> bool:
    """Whether elements of a type are no single numbers, so that they have no mean."""
    try:
        torch.zeros((), dtype=torch.uint8, device="cpu").view(dtype).double()
    except RuntimeError:
        return dtype.itemsize == 1
    return False


def _name(named: torch.dtype | torch.layout) -> str:
    return str(named).removeprefix("torch.")


def dense(tensor: Tensor) -> Tensor:
    """A copy of a plain tensor, contiguous and on the CPU."""
    return tensor.resolve_conj().resolve_neg().cpu().clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def write(tensor: Tensor, values: Tensor) -> None:
    """Plain tensor <- values, in place, also if it was made in inference mode."""
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(values)


def marks_of(tensors: Sequence[Tensor]) -> str:
    """A hash of plain tensors of any shape and type."""
    real = [
        torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        for tensor in tensors
    ]
    return mark_of(*(tensor.resolve_neg().contiguous().view(-1) for tensor in real))


def tensor_line(name: str, tensor: Tensor) -> str:
    """What must be equal on ranks that begin from one tensor: name, shape, type, memory order.

    Of what cannot be sent in place, the values, too. Where a dimension is 1 its stride means
    nothing.
    """
    parts, line = parts_of(tensor), f"{name}: "
    line += parts.kind
    if parts.copied:
        line += f" with hash {marks_of(parts.structure)[:16]}"
    if len(parts.values) == 1 and not parts.structure and not tensor.is_sparse:
        strides = tuple(
            stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
        )
        line += f", strides {strides}"
    return line


def warn_of_opaque(tensors: Mapping[str, Tensor]) -> None:
    """Warn of what can be neither sent to all ranks nor averaged."""
    if names := [repr(name) for name, tensor in tensors.items() if parts_of(tensor).opaque]:
        warnings.warn(
            f"{', '.join(names[:8])} cannot be read (a subclass of Tensor without"
            " __tensor_flatten__, or a layout of a library): it is neither sent to all ranks nor"
            " averaged, so that each rank keeps its own",
            stacklevel=4,
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """What a rank tells of a tensor: whether others can be averaged with it, and need to be."""

    kind: str
    mark: str
    finite: bool = True
    moved: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """What a rank tells of itself: whether it counts, and its tensors by name."""

    rank: int
    counts: bool
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Task:
    """A tensor to average."""

    name: str
    parts: Parts
    sharded: bool
    whole: bool
    """The first rank's is taken, not the mean."""
    finite: bool


class ExtraState:
    """What is averaged besides the parameters of a model that are trained."""

    def __init__(self, model: nn.Module, trained: set[int], links: WorkerGroups) -> None:
        """`trained`: the parameters that are averaged in rounds, by identity."""
        self._model, self._trained, self._links = model, trained, links
        self.frozen_marks: dict[str, str] = {}
        """Of frozen weights where training began; empty where any may have moved before."""

    def check(self, also: Sequence[nn.Module]) -> None:
        """Raise OptionError for what is no module."""
        for module in also:
            if not isinstance(module, nn.Module):
                raise OptionError(
                    f"what is averaged besides is a {type(module).__name__}; it must be a"
                    " torch.nn.Module, such as torch.optim.swa_utils.AveragedModel: put tensors"
                    " into its buffers"
                )

    def note_frozen(self) -> None:
        """Training begins: remember the frozen weights, to see which ones move.

        Their values are hashed: the version of a tensor does not tell what is written to `.data`.
        """
        frozen = self._frozen() if len(self._links.notices.ranks) > 1 else {}
        self.frozen_marks = {
            name: marks_of(parts_of(tensor).all) for name, tensor in frozen.items()
        }

    def average(self, also: Sequence[nn.Module], *, buffers: bool, counts: bool = True) -> None:
        """Average for good. All ranks call this, and wait for each other.

        A rank that does not count only gets the mean, unless none does.
        """
        tasks, counting, words = self._plan(also, buffers=buffers, counts=counts)
        self._average(tasks, counting, words)

    @contextmanager
    def averaged(self, also: Sequence[nn.Module], *, buffers: bool) -> Iterator[None]:
        """Within, the tensors hold their means; afterwards, what they held."""
        tasks, counting, words = self._plan(also, buffers=buffers, counts=True)
        changed = [part for task in tasks for part in task.parts.values]
        kept = [part.clone() for part in changed]
        try:
            self._average(tasks, counting, words)
            yield
        finally:
            for part, before in zip(changed, kept, strict=True):
                write(part, before)

    def _frozen(self) -> dict[str, Tensor]:
        named = self._model.named_parameters()
        return {name: param for name, param in named if id(param) not in self._trained}

    def _collect(self, also: Sequence[nn.Module], *, buffers: bool) -> dict[str, Tensor]:
        """Tensors to look at, by name."""
        named = {**dict(self._model.named_buffers()), **self._frozen()} if buffers else {}
        seen = {id(tensor) for tensor in named.values()}
        for index, module in enumerate(also):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if id(tensor) not in seen:
                    named[f"{type(module).__name__} {index}: {name}"] = tensor
                    seen.add(id(tensor))
        return named

    def _plan(
        self, also: Sequence[nn.Module], *, buffers: bool, counts: bool
    ) -> tuple[list[Task], list[bool], list[str]]:
        """What to average, which peers count, and what to warn of. All ranks call this.

        Tensors that are sharded within a worker are compared with peers alone.
        """
        self.check(also)
        named = self._collect(also, buffers=buffers)
        parts = {name: parts_of(tensor) for name, tensor in named.items()}
        entries_here = {
            name: self._entry(name, part) for name, part in parts.items() if not part.opaque
        }
        links = self._links
        workers: list[list[Row]] = links.of_all(Row(links.rank, counts, entries_here))
        rank_inside = links.workers.inner_ranks.index(links.rank)
        rows = [row for worker in workers for row in worker]
        peers = [worker[rank_inside] for worker in workers]
        vectors = _spectral_vectors(self._model, *also)
        tasks, words = [], []
        for name in dict.fromkeys(name for row in rows for name in row.entries):
            of_ranks = [row.entries.get(name) for row in rows]
            if not any(entry is None or entry.moved for entry in of_ranks):
                continue
            if len({entry.kind if entry else "" for entry in of_ranks}) > 1:
                words.append(_unlike(name, rows))
                continue
            sharded = isinstance(named[name], DTensor)
            entries = [row.entries[name] for row in (peers if sharded else rows)]
            if len({entry.mark for entry in entries}) > 1:
                first, finite = id(named[name]) in vectors, all(entry.finite for entry in entries)
                tasks.append(Task(name, parts[name], sharded, first, finite))
        counting = [any(row.counts for row in worker) for worker in workers]
        return tasks, counting if any(counting) else [True] * len(counting), words

    def _entry(self, name: str, parts: Parts) -> Entry:
        mark, kind = marks_of(parts.all), parts.kind
        if parts.structure:
            kind += f", structure with hash {marks_of(parts.structure)[:16]}"
        finite = all(bool(_wide(part).isfinite().all()) for part in parts.values if _has_mean(part))
        return Entry(kind, mark, finite, self.frozen_marks.get(name) != mark)

    @torch.no_grad()
    def _average(
        self, tasks: Sequence[Task], counting: Sequence[bool], words: Sequence[str]
    ) -> None:
        links, left_out = self._links, []
        counts = counting[links.workers.peer_ranks.index(links.rank)]
        for task in tasks:
            for part in task.parts.values:
                here, whole = dense(part), task.whole or not _has_mean(part)
                mean = links.mean(
                    here, sharded=task.sharded, counting=counting, whole=whole, finite=task.finite
                )
                if counts and not whole and not task.finite and _is_left_out(here, mean):
                    left_out.append(task.name)
                write(part, mean)
        if any(not task.finite for task in tasks):
            names_by_rank = links.of_all((links.rank, left_out))
            words = [*words, *_left_out(dict(rank for worker in names_by_rank for rank in worker))]
        for warning in words:
            warnings.warn(warning, stacklevel=6)


def _unlike(name: str, rows: Sequence[Row]) -> str:
    """What differs in a tensor, of the first two ranks that differ."""
    kinds = [
        (row.rank, row.entries[name].kind if name in row.entries else "not there") for row in rows
    ]
    first, kind = kinds[0]
    rank, other = next(pair for pair in kinds if pair[1] != kind)
    return (
        f"{name!r} is {kind} on rank {first}, and {other} on rank {rank}: it is not averaged, and"
        " each rank keeps its own"
    )


def _left_out(names_by_rank: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """What is said of elements that are not finite on some ranks; given by rank."""
    for name in dict.fromkeys(name for names in names_by_rank.values() for name in names):
        ranks = ", ".join(str(rank) for rank, names in names_by_rank.items() if name in names)
        yield (
            f"{name!r} has elements that are NaN or infinite on rank {ranks}, and not so on all"
            " ranks: these elements are averaged over the other ranks"
        )


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_left_out(here: Tensor, mean: Tensor) -> bool:
    """Whether elements of this rank's are not finite, and not those of the mean."""
    here, mean = _wide(here), _wide(mean)
    return bool((~here.isfinite() & (here != mean) & ~(here.isnan() & mean.isnan())).any())


def _wide(tensor: Tensor) -> Tensor:
    """The same numbers in a type that has all operations."""
    if tensor.is_complex():
        return tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _spectral_vectors(*modules: nn.Module) -> set[int]:
    """Vectors of power iterations, by identity: the mean of two has another length and sign."""
    vectors: set[int] = set()
    for module in (each for parent in modules for each in parent.modules()):
        if isinstance(module, _SpectralNorm):
            vectors |= {id(vector) for vector in module.buffers(recurse=False)}
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001 - where the older one is
            if isinstance(hook, SpectralNorm):
                named = (f"{hook.name}_u", f"{hook.name}_v")
                vectors |= {id(getattr(module, name, None)) for name in named}
    return vectors
