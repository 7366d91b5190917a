"""How GPUs divide a model: what each field of a mesh reaches."""

from dataclasses import replace

import pytest

from co2sim.schedule.mesh import MESH, Mesh

OF_STAGES = {"pp", "interleave", "schedule"}


@pytest.mark.parametrize("name", MESH)
def test_a_stage_has_all_of_a_mesh_but_its_stages(name: str) -> None:
    """So that no part of a model forgets a way to divide it."""
    mesh = Mesh(tp=2, pp=2)
    changed = replace(mesh, **{name: {"sequence_parallel": True, "schedule": "zbv"}.get(name, 4)})
    assert (changed.inside == mesh.inside) is (name in OF_STAGES)
    assert changed.mesh_words() != mesh.mesh_words()
