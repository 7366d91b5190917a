"""Models as JSON objects: what is written is read, and what is no model is refused in one line."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_gpt import BODY

from co2sim.catalog import load_model, names
from co2sim.catalog.model_files import model_from_json, model_to_json
from co2sim.common.errors import CatalogError
from co2sim.models.operators import Model, kinds, shard_model
from co2sim.models.transformer import Code, Experts, Transformer, language_model
from co2sim.schedule.mesh import Mesh
from co2sim.training.workload import Workload


def again(model: Model) -> Model:
    """The model of its text."""
    return model_from_json(json.loads(json.dumps(model_to_json(model))))


@pytest.mark.parametrize("name", names("models"))
def test_a_model_is_read_as_it_was_written(name: str) -> None:
    """Every operator, and which blocks share theirs."""
    model = load_model(name).value
    found = again(model)
    assert found == model
    assert kinds(found) == kinds(model)
    lists = {id(block.operators) for block in found.blocks}
    assert len(lists) == len({id(block.operators) for block in model.blocks})


def test_less_than_what_is_fused_is_read_as_it_was_written() -> None:
    """ReLU of eager code keeps no input: fewer elements than a fused kernel."""
    body = Transformer(layers=1, hidden=8, heads=2, ffn=32, code=Code(function=-1))
    model = language_model("relu", body, vocab=16, tokens=4, tied=True)
    assert again(model) == model


@pytest.mark.parametrize(
    "options",
    [
        {"lora": 4},
        {"tp": 2, "sequence_parallel": True, "ep": 2},
        {"cp": 2},
        {"narrow": "mxfp8", "recompute": "full"},
    ],
)
def test_operators_that_were_changed_are_read_as_they_were_written(options: dict[str, Any]) -> None:
    """Adapters, parts of ranks, narrow types, and how an operator runs again."""
    experts = Experts(count=4, active=2, width=32, load=1.5)
    body = replace(BODY, experts=experts)
    whole = language_model("m", body, vocab=96, tokens=32, tied=True)
    job = Workload(whole, **options).share
    assert again(job.model) == job.model
    executed = Model("m", tuple(made for _, made, _ in job.executed), 32)
    assert again(executed) == executed


# --- before there were operators ----------------------------------------------------------------


def old(model: Model, shape: dict[str, Any] | None) -> dict[str, Any]:
    """What a record said of a model; of a block some of its fields."""
    return {
        "name": model.name,
        "blocks": [
            {
                "name": block.name,
                "tensors": list(block.tensors),
                "flops": block.flops,
                "activation_bytes": 1000.0,
                "scores": None,
                "boundary_bytes": 2 * block.boundary,
                "experts": [],
            }
            for block in model.blocks
        ],
        "tokens": model.tokens,
        "unit": model.unit,
        "shape": shape,
    }


SHAPE: dict[str, Any] = {
    "name": "gpt",
    "body": asdict(BODY),
    "vocab": 100,
    "tokens": 32,
    "tied": True,
    "positions": 32,
}


def test_an_old_network_is_built_again_of_its_shape() -> None:
    """All of it, so that ranks can divide it."""
    options = {key: value for key, value in SHAPE.items() if key not in {"name", "body"}}
    model = language_model("gpt", BODY, **options)
    found = model_from_json(json.loads(json.dumps(old(model, SHAPE))))
    assert found == model
    assert Workload(found, tp=2).share.parameters < model.parameters


@pytest.mark.parametrize(
    "shape",
    [None, {}, {"body": 3}, SHAPE | {"vocab": 101}, SHAPE | {"tokens": "x"}, SHAPE | {"more": 1}],
    ids=str,
)
def test_without_a_fitting_shape_blocks_are_what_the_record_states(
    shape: dict[str, Any] | None,
) -> None:
    """Parameters, FLOP, kept bytes and inputs; nothing is known of their operators."""
    options = {key: value for key, value in SHAPE.items() if key not in {"name", "body"}}
    model = language_model("gpt", BODY, **options)
    found = model_from_json(old(model, shape))
    assert not found.divisible
    for block, stated in zip(found.blocks, model.blocks, strict=True):
        assert (block.tensors, block.flops) == (stated.tensors, stated.flops)
        assert block.boundary == stated.boundary
        assert 2 * sum(op.rows * op.kept for op in block.operators) == 1000.0


# --- no models ----------------------------------------------------------------------------------

TREE = model_to_json(load_model("mixtral-8x7b").value)
NONSENSE: list[Any] = [None, -1, 0, 1e40, 0.5, True, "", "x", [], {}, [0], float("nan")]


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found = [path] if path else []
    for key, value in inner:
        below = isinstance(value, dict | list)
        found += places(value, (*path, key)) if below else [(*path, key)]
    return found


@given(st.sampled_from(places(TREE)), st.sampled_from(NONSENSE))
def test_nonsense_is_refused_in_one_line_or_makes_a_model_that_computes(
    place: tuple[Any, ...], value: Any
) -> None:
    """Whatever stands in place of something that was written."""
    tree = json.loads(json.dumps(TREE))
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        model = model_from_json(tree)
    except CatalogError as caught:
        message = str(caught)
    else:
        message = ""
        assert model.parameters > 0
        for work in Workload(model, attention="eager").works():
            assert work.forward.flops >= 0
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "format"),
        ({"blocks": []}, "blocks"),
        ({"blocks": [{"name": "x", "operators": 7}]}, "operators"),
        ({"operators": [[{"kind": "sieve"}]]}, "sieve"),
        ({"operators": [[{"kind": "product", "inner": 2}]]}, "columns"),
        ({"more": 1}, "more"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(changes: dict[str, Any], said: str) -> None:
    """The key, the value, or the kind."""
    with pytest.raises(CatalogError, match=said):
        model_from_json(TREE | changes)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(ep=2)], ids=str)
def test_a_model_of_a_file_divides_as_before(mesh: Mesh) -> None:
    """As each operator says it."""
    whole = load_model("mixtral-8x7b").value
    assert shard_model(again(whole), mesh) == shard_model(whole, mesh)
