"""Parameters as one flat fp32 vector, of which this rank keeps a part for its worker.

Parameters of one dtype stand together, in the order of the model, each in the order of its memory:

- sharded over all ranks of the worker (DTensor, as FSDP2 makes them): this rank's local shard;
- replicated among g ranks of the worker (plain parameters, DDP, HSDP, what tensor parallelism
  leaves whole): this rank's 1/g of all that these g hold, in a row, rounded up, so the last ranks
  may have less, or nothing. Writing gathers the others'.

So the vectors of a worker's ranks hold every element of the model once. Which part of a tensor a
rank holds, a DTensor tells by its mesh and placements. In a dimension of the mesh that shards the
tensor the place of the rank counts: so with FSDP2, with tensor parallelism, and with both
(`_StridedShard`). Ranks that differ only in other dimensions hold the same part: in those that
replicate (HSDP), and in those that the mesh of this tensor lacks.

Rounding. The fp32 vector is exact; the model holds it rounded to the parameters' dtype.
A displacement is therefore taken from the *rounded* anchor, where the local steps began: a
parameter that did not move has displacement 0 exactly. Taken from the anchor itself, every round
would feed the rounding error back and undo all that fp32 keeps below the dtype's resolution.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from co2sim.common.errors import OptionError
from realrun.algorithms.process_groups import WorkerGroups, my_rank
from realrun.torch_compat import all_gather_single


@dataclass(frozen=True, slots=True)
class Holders:
    """Who in a worker holds which part of a tensor.

    This rank holds `part`, which is empty for the whole tensor. `ranks`, this one among them, hold
    the same, and gather in `group`. `all_ranks` are the ranks of the worker, part by part.
    """

    part: str
    ranks: tuple[int, ...]
    all_ranks: tuple[tuple[int, ...], ...]
    group: dist.ProcessGroup | None = None


ALONE = Holders("", (0,), ((0,),))
"""A worker of one rank."""


def holders_of(tensors: Mapping[str, Tensor], links: WorkerGroups) -> dict[str, Holders]:
    """The holders of named tensors. All ranks call this. Raises OptionError; see `part_of`."""
    ranks = links.workers.inner_ranks
    parts_here = {name: part_of(name, tensor, ranks) for name, tensor in tensors.items()}
    rows = links.of_worker(parts_here)
    names = dict.fromkeys(name for row in rows for name in row)  # the same on all of them

    @cache
    def alike(parts: Sequence[str | None]) -> tuple[tuple[int, ...], ...]:
        pairs = list(zip(ranks, parts, strict=True))
        return tuple(
            tuple(rank for rank, other in pairs if other == part) for part in dict.fromkeys(parts)
        )

    by_name = {name: alike(tuple(row.get(name) for row in rows)) for name in names}
    fewer = {
        holders for every in by_name.values() for holders in every if 1 < len(holders) < len(ranks)
    }
    groups = links.among(fewer)
    mine = {
        name: next(holders for holders in by_name[name] if links.rank in holders)
        for name in parts_here
    }
    return {
        name: Holders(part, mine[name], by_name[name], groups.get(mine[name], links.gather))
        for name, part in parts_here.items()
    }


def part_of(name: str, tensor: Tensor, ranks: Sequence[int]) -> str:
    """What this rank holds of a tensor of its worker, `ranks`; nothing is said of a whole one.

    Raises OptionError for a DTensor with partial sums, and for one on ranks of other workers.
    """
    if not isinstance(tensor, DTensor):
        return ""
    mesh = tensor.device_mesh
    spread, here = sorted(mesh.mesh.flatten().tolist()), mesh.get_coordinate()
    if here is None or set(spread) - set(ranks):
        raise OptionError(
            f"{name!r} is spread over ranks {spread}, but this rank's worker is ranks"
            f" {list(ranks)}: the mesh must hold this rank, and no rank of another worker"
            " (worker='node', or Workers.of_mesh)"
        )
    placed = list(zip(tensor.placements, here, mesh.shape, strict=True))
    if any(placement.is_partial() for placement, _, _ in placed):
        raise OptionError(
            f"{name!r} is placed as {tensor.placements}; each placement must be a shard or"
            " Replicate()"
        )
    return ", ".join(
        f"{placement!r} {index} of {count}"
        for placement, index, count in placed
        if count > 1 and not placement.is_replicate()
    )


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What fp32 holds exactly."""

_CHUNK = {"cpu": 2**18, "cuda": 2**25}
"""Elements that are worked on at once: few enough for a CPU's cache, many enough for a GPU."""


Masters: TypeAlias = Callable[[Tensor], Tensor | None]
"""The master weights of a parameter, which an optimizer keeps in fp32; None before it has them."""


_ROUNDINGS = 4
"""Of the largest parameter."""
_SOME = 16
"""Elements that are looked at where not all need be."""


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter, and the elements of it that this rank could write."""

    name: str
    parameter: Tensor
    elements: int
    part: str = ""
    masters: Masters | None = None

    def held(self) -> Tensor:
        """What the next step begins from: the master weights, if there are any."""
        master = self.masters(self.parameter) if self.masters else None
        if master is None:
            return memory(self.parameter)
        values = memory(master)
        if values.numel() != self.elements:
            raise OptionError(
                f"the master weights of {self.name!r} have {values.numel()} elements on this rank,"
                f" the parameter {self.elements}"
            )
        return values


@dataclass(frozen=True, slots=True)
class Section:
    """Parameters of one dtype; elements [first, first + size) of their row are this rank's.

    They stand at [start, start + size) of this rank's vector. `ranks` of the worker hold this row,
    and gather it in `group`. `share` elements are what each of them has at most; it is 0 where
    nothing needs to be gathered.
    """

    dtype: torch.dtype
    members: tuple[Member, ...]
    start: int
    first: int
    size: int
    share: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    def spans(self, first: int, last: int) -> Iterator[tuple[Member, slice, slice]]:
        """Members, which of their elements are in [first, last) of the row, and where in that."""
        offset = 0
        for member in self.members:
            low, high = max(offset, first), min(offset + member.elements, last)
            if low < high:
                yield member, slice(low - offset, high - offset), slice(low - first, high - first)
            offset += member.elements

    def row(self, element: int) -> int:
        """The place in the section's row of an element of this rank's vector."""
        return self.first + element - self.start

    @property
    def whole(self) -> int:
        """Elements of the whole row."""
        return sum(member.elements for member in self.members)

    def own(self, vector: Tensor) -> Tensor:
        """This section of a vector of this rank."""
        return vector[self.start : self.start + self.size]


@dataclass(frozen=True)
class Flat:
    """How this rank's parameters map to its flat vector of `elements` fp32 numbers.

    Parameters are on `device`. Vectors are there, too, or with `offload` in pinned host memory.
    """

    sections: tuple[Section, ...]
    elements: int
    device: torch.device
    offload: bool = False

    @classmethod
    def of(
        cls,
        parameters: Sequence[tuple[str, Tensor]],
        holders: Mapping[str, Holders] | None = None,
        masters: Masters | None = None,
        *,
        offload: bool = False,
    ) -> "Flat":
        """Lay out named parameters, with their holders; without, this rank is a worker.

        With `masters` the vector is that of master weights in fp32, which nothing rounds.

        Raises OptionError for parameters that cannot be kept so: other dtypes, memory with holes,
        or several devices.
        """
        if not parameters:
            raise OptionError("the model has no trainable parameters")
        devices = {param.device for _, param in parameters}
        if len(devices) > 1:
            raise OptionError(f"parameters are on {', '.join(sorted(map(str, devices)))}; use one")
        for name, param in parameters:
            _check(name, param)
        by_name = holders or {name: ALONE for name, _ in parameters}
        sections = lay_out(parameters, by_name, my_rank() if holders else 0, masters)
        elements = sum(section.size for section in sections)
        return cls(sections, elements, devices.pop(), offload)

    def describe(self) -> list[str]:
        """One line per section and shard: what is equal on ranks that average with each other."""
        rows = [
            f"section of {section.dtype}: {section.size} elements from {section.first}"
            for section in self.sections
        ]
        members = [member for section in self.sections for member in section.members]
        return rows + [f"part of {member.name}: {member.part}" for member in members if member.part]

    def empty(self, rows: int = 0, *, on_host: bool = False) -> Tensor:
        """A vector of zeros, or some rows of them."""
        shape = (rows, self.elements) if rows else (self.elements,)
        if not self.offload or self.device.type != "cuda":
            device = torch.device("cpu") if on_host else self.device
            return torch.zeros(shape, dtype=torch.float32, device=device)
        return torch.zeros(shape, dtype=torch.float32, device="cpu", pin_memory=True)

    @torch.no_grad()
    def read(self, vector: Tensor, start: int = 0) -> None:
        """`vector` <- elements from `start` on of what the model holds."""
        for section, low, high in self._within(start, len(vector)):
            values = vector[low - start : high - start]
            spans = section.spans(section.row(low), section.row(high))
            _copy((values[there], member.held()[inside]) for member, inside, there in spans)

    @torch.no_grad()
    def write(self, vector: Tensor, start: int = 0) -> None:
        """Elements from `start` on of the model <- `vector`, rounded.

        Ranks that share replicated parameters gather them: whole, whatever is written.
        """
        if len(vector) < self.elements and any(section.share for section in self.sections):
            whole = self.empty()
            self.read(whole)
            whole[start : start + len(vector)].copy_(vector)
            vector, start = whole, 0
        for section, low, high in self._within(start, len(vector)):
            values = vector[low - start : high - start]
            first, last = section.row(low), section.row(high)
            if section.share:
                values, first, last = self._gather(section, values), 0, section.whole
            spans = list(section.spans(first, last))
            _copy((member.held()[inside], values[there]) for member, inside, there in spans)
            rows = [(memory(each.parameter), each.held(), inside) for each, inside, _ in spans]
            _copy(
                (live[inside], master[inside])
                for live, master, inside in rows
                if live.data_ptr() != master.data_ptr()
            )

    def _within(self, start: int, elements: int) -> Iterator[tuple[Section, int, int]]:
        """Sections, and the elements from `start` on that are theirs: first and last of them."""
        for section in self.sections:
            low = max(section.start, start)
            yield section, low, max(low, min(section.start + section.size, start + elements))

    def _gather(self, section: Section, values: Tensor) -> Tensor:
        """The section's whole row, in its dtype, from all ranks that hold it."""
        assert section.group is not None
        mine = torch.zeros(section.share, dtype=section.dtype, device=self.device)
        mine[: section.size].copy_(values)
        row = torch.empty(
            section.share * len(section.ranks), dtype=section.dtype, device=self.device
        )
        all_gather_single(row, mine, group=section.group)
        return row

    def replicas(self) -> dict[tuple[int, ...], list[Tensor]]:
        """Memory of replicated parameters, by the ranks of the worker that must hold the same."""
        replicas: dict[tuple[int, ...], list[Tensor]] = {}
        for section in self.sections:
            if section.share:
                parts = [memory(member.parameter) for member in section.members]
                replicas.setdefault(section.ranks, []).extend(parts)
        return replicas

    def round(self, vector: Tensor) -> None:
        """Round `vector` to what the model would hold."""
        for section in self.sections:
            if section.dtype != torch.float32:
                values = section.own(vector)
                values.copy_(values.to(section.dtype))

    def are_close(self, vector: Tensor, other: Tensor) -> bool:
        """Whether vectors differ by what rounding leaves where noise was added and taken away."""
        return all(
            not section.size
            or bool(
                (section.own(vector) - section.own(other)).abs().max()
                <= _ROUNDINGS * torch.finfo(section.dtype).eps * section.own(other).abs().max()
            )
            for section in self.sections
        )

    def displace(self, anchor: Tensor, live: Tensor) -> None:
        """`live` <- rounded anchor - live: how far the model has moved down from its anchor."""
        for section in self.sections:
            for start, here in zip(
                torch.split(section.own(anchor), self.chunk),
                torch.split(section.own(live), self.chunk),
                strict=True,
            ):
                torch.sub(start.to(section.dtype), here, out=here)

    def parts(self, start: int, elements: int) -> Iterator[tuple[torch.dtype, slice]]:
        """Cut elements from `start` on into parts of one dtype of the model, a chunk at most each.

        Slices count from `start`.
        """
        for section, low, high in self._within(start, elements):
            for first in range(low, high, self.chunk):
                yield section.dtype, slice(first - start, min(first + self.chunk, high) - start)

    @property
    def chunk(self) -> int:
        """Elements to work on at once."""
        return _CHUNK.get("cpu" if self.offload else self.device.type, _CHUNK["cuda"])

    def name_at(self, element: int) -> str:
        """The parameter that an element of the vector belongs to."""
        for section in self.sections:
            if 0 <= element - section.start < section.size:
                row = section.row(element)
                return next(member.name for member, _, _ in section.spans(row, row + 1))
        raise IndexError(f"element {element} of {self.elements}")


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """The first tensor of each pair <- the second."""
    targets, sources = [list(tensors) for tensors in zip(*pairs, strict=True)] or ([], [])
    if targets:
        torch._foreach_copy_(targets, sources)


def lay_out(
    parameters: Sequence[tuple[str, Tensor]],
    holders: Mapping[str, Holders],
    rank: int,
    masters: Masters | None = None,
) -> tuple[Section, ...]:
    """Sections of named parameters, as a rank keeps them.

    All ranks of a worker have the same sections in the same order, so that they gather in turn.
    """

    def kind(pair: tuple[str, Tensor]) -> tuple[torch.dtype, tuple[tuple[int, ...], ...]]:
        return torch.float32 if masters else pair[1].dtype, holders[pair[0]].all_ranks

    kinds = list(dict.fromkeys(map(kind, parameters)))
    ordered = sorted(parameters, key=lambda pair: kinds.index(kind(pair)))
    sections, start = [], 0
    for (dtype, _), row in groupby(ordered, key=kind):
        members = tuple(
            Member(name, param, memory(param).numel(), holders[name].part, masters)
            for name, param in row
        )
        ranks, group = holders[members[0].name].ranks, holders[members[0].name].group
        whole = sum(member.elements for member in members)
        spread = len(ranks) > 1
        share = -(-whole // len(ranks)) if spread else 0
        first = min(ranks.index(rank) * share, whole)
        size = min(share, whole - first) if spread else whole
        sections.append(Section(dtype, members, start, first, size, share, ranks, group))
        start += size
    return tuple(sections)


def memory(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, as a flat view in the order of memory."""
    local = local_part(parameter)
    if local.is_contiguous():
        return local.view(-1)
    return local.as_strided((local.numel(),), (1,))


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without its gradient."""
    part = tensor.detach()
    return part.to_local() if isinstance(part, DTensor) else part


def keeps_elements_elsewhere(tensor: Tensor) -> bool:
    """Whether a subclass of Tensor has no memory itself, as quantized ones: few operations work."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def is_plain(tensor: Tensor) -> bool:
    """Whether every operation works on it: strided, with memory that is its own. Shards are."""
    if isinstance(tensor, DTensor):
        return is_plain(tensor.to_local())
    return (
        not keeps_elements_elsewhere(tensor)
        and not is_lazy(tensor)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether what this rank holds of a plain tensor is a row of memory, without holes."""
    local, step = local_part(tensor), 1
    for stride, size in sorted(zip(local.stride(), local.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= max(1, size)
    return True


def some(values: Tensor) -> Tensor:
    """Some elements of a vector, evenly spread."""
    return values[:: max(1, len(values) // _SOME)][:_SOME]


def _check(name: str, parameter: Tensor) -> None:
    if not is_plain(parameter):
        lazy = is_lazy(parameter)
        what = "not initialized" if lazy else f"{parameter.layout} on {parameter.device}"
        raise OptionError(
            f"{name!r} is a {type(parameter).__name__}, {what}; a parameter that is trained must be"
            " a dense tensor in memory (of a lazy module after its first batch), or a DTensor"
        )
    if parameter.dtype not in DTYPES:
        raise OptionError(
            f"{name!r} is {parameter.dtype}; averages are in fp32, so parameters must be one of"
            f" {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
        )
    if not is_dense(parameter):
        strides = parameter.stride()
        raise OptionError(f"{name!r} is not dense in memory (strides {strides})")
