"""Configs that a function of Python returns, as nested keys: read, never executed.

Keywords of calls are keys, and what is called is their `_target_`, as Hydra has it. Literals, sums,
parameters with defaults, and other functions of the file are followed; all else stays open.
"""

import ast
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_CALLS = 10_000
_MOST_BITS = 64
_MOST_NAMES = 8
"""Of functions in a line."""
_SUMS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_TREES = {"run.Config", "run.Partial", "Config", "Partial"}
"""Of NeMo-Run: the first argument is what is called."""


def read(text: str, name: str = "") -> dict[str, Any]:
    """What a function returns, by name; of a single one without.

    Raises ValueError for what is no config, and where the name is none of several.
    """
    try:
        body = ast.parse(text).body
        functions = {part.name: part for part in body if isinstance(part, ast.FunctionDef)}
        if name not in functions and (name or len(functions) != 1):
            more = ", ..." * (len(functions) > _MOST_NAMES)
            names = f"{', '.join([*functions][:_MOST_NAMES])}{more}"
            raise ValueError(
                f"FILE:NAME reads a function, one of {names}" if names else "no function"
            )
        chosen = name or next(iter(functions))
        tree = _Scope({}, functions).run(body).called(functions[chosen], {})
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(getattr(error, "msg", "") or "it is nested too deeply") from error
    return {**(tree if isinstance(tree, dict) else {}), "function": chosen}


@dataclass(slots=True)
class _Scope:
    """What names stand for, and the functions of the file."""

    values: dict[str, Any]
    functions: Mapping[str, ast.FunctionDef]
    calls: list[str] = field(default_factory=list)
    result: Any = None
    returned: bool = False

    def run(self, statements: Sequence[ast.stmt]) -> "_Scope":
        """Follow assignments, branches that literals decide, and the end of a function."""
        for statement in statements:
            match statement:
                case _ if self.returned:
                    break
                case ast.Assign(targets=[target], value=value):
                    self.assign(target, self.value(value))
                case ast.AnnAssign(target=target, value=ast.expr() as value):
                    self.assign(target, self.value(value))
                case ast.If(test=test, body=body, orelse=other):
                    holds = self.value(test)
                    if holds is None or isinstance(holds, bool):
                        self.run(body if holds else other)
                case ast.Return(value=ast.expr() as value):
                    self.result, self.returned = self.value(value), True
        return self

    def assign(self, target: ast.expr, value: Any) -> None:
        """To a name, or to a part of what one stands for."""
        if isinstance(target, ast.Name):
            self.values[target.id] = value
        elif isinstance(target, ast.Attribute) and isinstance(
            whole := self.value(target.value), dict
        ):
            whole[target.attr] = value

    def called(self, function: ast.FunctionDef, keywords: Mapping[str, Any]) -> Any:
        """What a function returns."""
        self.calls.append(function.name)
        if len(self.calls) > _MOST_CALLS:
            raise ValueError(f"its functions call each other more than {_MOST_CALLS:,} times")
        names = function.args
        usual = zip(names.args[::-1], names.defaults[::-1], strict=False)
        also = zip(names.kwonlyargs, names.kw_defaults, strict=True)
        values = {name.arg: self.value(node) for name, node in (*usual, *also) if node}
        scope = _Scope({**self.values, **values, **keywords}, self.functions, self.calls)
        return scope.run(function.body).result

    def value(self, node: ast.expr) -> Any:
        """Of literals and of what names stand for; with $ in front where nothing says it."""
        result: Any = f"${ast.unparse(node)}"
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                result = node.value
            case ast.Name(id=name):
                result = self.values.get(name, result)
            case ast.Attribute(value=base, attr=name):
                whole = self.value(base)
                result = whole.get(name, result) if isinstance(whole, dict) else result[1:]
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                values = [self.value(part) for part in parts]
                result = [v.get("_target_", "") if isinstance(v, dict) else v for v in values]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as size)):
                result = -size
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
                two = self.value(left), self.value(right)
                if all(type(x) is int and x.bit_length() < _MOST_BITS for x in two):
                    result = _SUMS[type(op)](*two)
            case ast.Call():
                result = self.call(node)
        return result

    def call(self, node: ast.Call) -> Any:
        """Keywords of a call as a tree; what a function of the file returns."""
        target, values = ast.unparse(node.func), node.args
        keywords = {part.arg: self.value(part.value) for part in node.keywords if part.arg}
        if target in self.functions:
            names = [name.arg for name in self.functions[target].args.args]
            first = dict(zip(names, map(self.value, values), strict=False))
            return self.called(self.functions[target], first | keywords)
        if target in _TREES and values:
            target = ast.unparse(values[0])
        return {"_target_": target, **keywords}
