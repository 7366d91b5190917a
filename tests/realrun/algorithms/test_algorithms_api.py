"""What `realrun.algorithms` offers to a training loop: names, errors, types and timeouts."""

import ast
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from local_problem import begun

from realrun import algorithms

FOLDER = Path(algorithms.__file__).parent
INSIDE = {"IndexError", "StoreError", "TimeoutError"}
"""Raised for the package itself."""
KINDS = ("CO2", "SlowMo", "LocalSGD", "OverlapLocalSGD", "DiLoCo")


def test_every_error_that_is_raised_can_be_caught_by_its_name_there() -> None:
    """All classes in a `raise` of the package are exported, and so is what they have in common."""
    raised = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                raised.add(getattr(node.exc.func, "id", ""))
    ours = {name for name in raised if name.endswith("Error") and name not in INSIDE}
    assert ours >= {"OptionError", "MismatchError", "NonFiniteError"}
    exported = {name for name in algorithms.__all__ if name.endswith(("Error", "Failure"))}
    assert exported == {*ours, "RankFailure", "Co2simError"}
    for name in exported:
        assert issubclass(getattr(algorithms, name), algorithms.Co2simError)


def test_all_names_are_there_and_none_is_missing() -> None:
    """`__all__` is what the package imports, but for its modules."""
    assert sorted(set(algorithms.__all__)) == sorted(algorithms.__all__)
    public = {
        name
        for name, value in vars(algorithms).items()
        if not name.startswith("_") and type(value) is not type(algorithms)
    }
    assert public == set(algorithms.__all__)


def test_types_may_be_given_as_torch_names_them() -> None:
    """Of every algorithm, beside the names that were there before."""
    for name in KINDS:
        for dtype, wire in [
            ("bf16", "bf16"),
            (torch.bfloat16, "bf16"),
            (torch.float32, "fp32"),
            (torch.int8, "int8"),
        ]:
            _, _, algorithm = begun(name, dtype=dtype)
            assert algorithm._outer.average._wire == wire
            algorithm.close()
