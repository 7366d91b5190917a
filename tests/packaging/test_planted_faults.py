"""What `make mutants` and `make faults` plant."""

import ast

import pytest
from planted_faults import Source, changes, executed


@pytest.mark.parametrize(
    ("code", "faulty"),
    [
        ("return a < b", {"return a <= b", "return None"}),
        ("x = a - b", {"x = (a + b)"}),
        ("x = a and b", {"x = ((a) or (b))"}),
        ("x = not a", {"x = (a)"}),
        ("x = 2", {"x = 3"}),
        ("x = max(a, b)", {"x = min(a, b)", "x = max(b, a)"}),
        ("if a: b()", {"if (not (a)): b()", "if a: pass"}),
        ("x += a", {"pass"}),
        ("raise E(a < b)", set()),
    ],
)
def test_an_operator_changes_one_place(code: str, faulty: set[str]) -> None:
    """Each fault is the code with one change; messages of errors stay."""
    source = Source(f"def f():\n    {code}\n")
    found = {
        source.text[:begin] + text + source.text[end:]
        for node in executed(ast.parse(source.text))
        for _, (begin, end), text in changes(node, source)
    }
    assert found == {f"def f():\n    {one}\n" for one in faulty}
