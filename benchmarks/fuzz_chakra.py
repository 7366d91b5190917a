"""Chakra traces that nobody means well: ours with a damaged file, and those of others."""

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import fuzz_inputs as made_of
from fuzz_inputs import Made

from co2sim import Case, chakra
from co2sim.chakra.schema import delimited, schema


def damaged(rng: random.Random, drawn: tuple[Any, ...]) -> Made:
    """The command that replays a trace of 2 ranks, one file of which is changed."""
    files = dict(_of_others() if rng.random() < 0.5 else _ours())  # noqa: PLR2004 - half of them
    name = rng.choice(sorted(files))
    if name.endswith(".json"):
        tree = {"1": [0, 1], "2": [0]}
        files[name] = made_of.mutated(tree, rng, drawn, made_of.as_json)
    else:
        files[name] = made_of.bytewise(files[name], rng)
    place = {f"trace/{one}": content for one, content in files.items()}
    return Made(place, ["replay", "trace", "--cluster", "dgx-h100", "--json"])


@cache
def _ours() -> tuple[tuple[str, bytes], ...]:
    """What co2sim writes."""
    case = Case(cluster="dgx-h100", model="gpt2-small", strategy="ddp", gpus=2).prepare()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "trace"
        chakra.write(case.schedule, case.cluster, place, precision="bf16")
        return tuple((one.name, one.read_bytes()) for one in sorted(place.iterdir()))


@cache
def _of_others() -> tuple[tuple[str, bytes], ...]:
    """A compute, an all-reduce behind it, and a compute behind that."""
    kinds = schema()
    head = kinds.GlobalMetadata(version="0.0.4")
    nodes = [kinds.Node(id=place, name=f"node{place}") for place in range(3)]
    compute, reduce = {"num_ops": 10**9, "tensor_size": 100}, {"comm_size": 10**6, "comm_type": 0}
    for place, node in enumerate(nodes):
        node.type = kinds.COMM_COLL_NODE if place == 1 else kinds.COMP_NODE
        node.data_deps.extend(range(place))
        for name, value in (compute, reduce, compute)[place].items():
            node.attr.append(kinds.AttributeProto(name=name, int64_val=value))
    nodes[1].attr.append(kinds.AttributeProto(name="pg_name", string_val="1"))
    content = b"".join(delimited(one.SerializeToString()) for one in (head, *nodes))
    groups = b'{"1": [0, 1]}'
    return (("x.0.et", content), ("x.1.et", content), ("comm_group.json", groups))
