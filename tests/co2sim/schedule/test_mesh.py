"""How GPUs divide a model: what each field of a mesh reaches."""

from dataclasses import replace

import pytest

from co2sim.common.errors import OptionError
from co2sim.schedule.mesh import MESH, Mesh
from co2sim.schedule.schedule import Layout

OF_STAGES = {"pp", "interleave", "schedule"}


@pytest.mark.parametrize("name", MESH)
def test_a_stage_has_all_of_a_mesh_but_its_stages(name: str) -> None:
    """So that no part of a model forgets a way to divide it."""
    mesh = Mesh(tp=2, pp=2)
    changed = replace(mesh, **{name: {"sequence_parallel": True, "schedule": "zbv"}.get(name, 4)})
    assert (changed.inside == mesh.inside) is (name in OF_STAGES)
    assert changed.mesh_words() != mesh.mesh_words()


def test_gpus_of_two_stages_share_no_layers_with_dualpipe() -> None:
    """Both have the same two parts, each by itself: tp reaches no GPU of the other."""
    mesh = Mesh(tp=4, pp=4, schedule="dualpipe")
    with pytest.raises(OptionError, match="tp=4 x cp=1 does not divide the 2 GPUs of a stage"):
        mesh.stage_gpus(Layout(1, 8))
    assert mesh.stage_gpus(Layout(2, 8)) == 8
