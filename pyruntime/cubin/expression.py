"""Formulas and rules that a user writes, evaluated without running any code of theirs.

Text is parsed by Python's own `ast` and then only these are accepted: names, integers and strings,
+ - * //, max and min, parentheses; in rules also decimals, comparisons and and/or/not, in addresses
% and ^.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from pyruntime.errors import InputError

Value = int | float | str | bool | None

_LONGEST, _DEEPEST = 1000, 100  # characters, nested operations
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
_BITS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mod: operator.mod,
    ast.BitXor: operator.xor,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"max": max, "min": min}


class Formula:
    """Integer arithmetic over names: "3*TQ*(hd + 8)*2".

    Raises:
        InputError: the text holds anything but names, integers, + - * // max min and parentheses.
    """

    rules = False
    operators, symbols = _ARITHMETIC, "+ - * // max min"

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LONGEST:
            raise InputError(f"a formula of {len(text)} characters; at most {_LONGEST} are read")
        try:
            self._body = ast.parse(text.strip(), mode="eval").body
            if _depth(self._body) > _DEEPEST:
                raise InputError(f"a formula with more than {_DEEPEST} nested operations")
            self.names = frozenset(self._check(self._body))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise InputError(f"{text!r} is not a formula") from None

    def __call__(self, values: Mapping[str, Value]) -> int:
        """The formula's value.

        Raises:
            InputError: a name has no value, or a division by zero.
        """
        result = self._evaluate(self._body, values)
        if not isinstance(result, int):
            raise InputError(f"{self.text!r} gives {result!r}, not a number")
        return result

    def _check(self, node: ast.expr) -> set[str]:
        """The names in a node; raises if it holds anything that is not allowed."""
        match node:
            case ast.Name(id=name):
                return {name}
            case ast.Constant(value=value) if type(value) is int:
                return set()
            case ast.Constant(value=float() | str()) if self.rules:
                return set()
            case ast.BinOp(left=left, op=op, right=right) if type(op) in self.operators:
                return self._check(left) | self._check(right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._check(operand)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
                name in _FUNCTIONS and len(args) > 1
            ):
                return set().union(*map(self._check, args))
            case ast.Compare(left=left, ops=ops, comparators=others) if self.rules and all(
                type(op) in _COMPARISONS for op in ops
            ):
                return self._check(left).union(*map(self._check, others))
            case ast.BoolOp(values=parts) if self.rules:
                return set().union(*map(self._check, parts))
            case ast.UnaryOp(op=ast.Not(), operand=operand) if self.rules:
                return self._check(operand)
        allowed = f"names, numbers, {self.symbols}" + (
            ", comparisons, and, or, not" if self.rules else ""
        )
        raise InputError(f"{self.text!r}: {ast.unparse(node)!r} is not allowed (only {allowed})")

    def _evaluate(self, node: ast.expr, values: Mapping[str, Value]) -> Value:
        """A checked node's value; None (unknown) makes what depends on it unknown."""
        match node:
            case ast.Name(id=name):
                if name not in values:
                    raise InputError(
                        f"{self.text!r}: no value for {name}; known are {', '.join(sorted(values))}"
                    )
                return values[name]
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.BinOp(left=left, op=op, right=right):
                return self._apply(self.operators[type(op)], (left, right), values)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._apply(operator.neg, (operand,), values)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._apply(operator.not_, (operand,), values)
            case ast.Call(func=ast.Name(id=name), args=args):
                return self._apply(_FUNCTIONS[name], tuple(args), values)
            case ast.Compare(left=left, ops=ops, comparators=others):
                results = [
                    self._apply(_COMPARISONS[type(op)][1], pair, values)
                    for op, *pair in zip(ops, [left, *others], others, strict=False)
                ]
                return _all(results)
            case ast.BoolOp(op=ast.And(), values=parts):
                return _all([self._evaluate(part, values) for part in parts])
            case ast.BoolOp(values=parts):
                negated = _all([_not(self._evaluate(part, values)) for part in parts])
                return _not(negated)
        raise AssertionError("checked above")

    def _apply(
        self,
        function: Callable[..., Any],
        nodes: tuple[ast.expr, ...] | list[ast.expr],
        values: Mapping[str, Value],
    ) -> Value:
        arguments = [self._evaluate(node, values) for node in nodes]
        if None in arguments:
            return None
        try:
            result: Value = function(*arguments)
        except (ZeroDivisionError, TypeError) as error:
            raise InputError(f"{self.text!r}: {error}") from None
        return result


class Address(Formula):
    """A formula that also knows % and ^ (exclusive or): "lane % 8 * 128 + (lane ^ 3) // 8 * 16"."""

    operators, symbols = {**_ARITHMETIC, **_BITS}, f"{Formula.symbols} % ^"


class Rule(Formula):
    """A condition over the fields of a record: "spill_bytes == 0 and registers <= 128"."""

    rules = True

    def holds(self, values: Mapping[str, Value]) -> bool | None:
        """Whether the rule holds; None if that depends on an unknown field (Kleene's logic).

        Raises:
            InputError: see `Formula`.
        """
        result = self._evaluate(self._body, values)
        return None if result is None else bool(result)

    def margins(self, values: Mapping[str, Value]) -> dict[str, float]:
        """How far each field is from its limit, for the parts of the form FIELD <= NUMBER."""
        found = {}
        for node in ast.walk(self._body):
            match node:
                case ast.Compare(
                    left=ast.Name(id=name),
                    ops=[op],
                    comparators=[ast.Constant(value=int() | float() as limit)],
                ):
                    value = values.get(name)
                    if isinstance(value, int | float) and isinstance(op, ast.LtE | ast.Lt | ast.Eq):
                        whole = isinstance(value, int) and isinstance(limit, int)
                        found[name] = limit - value - (whole and isinstance(op, ast.Lt))
        return found


def _depth(node: ast.AST) -> int:
    return 1 + max(map(_depth, ast.iter_child_nodes(node)), default=0)


def _all(results: list[Value]) -> Value:
    if any(r is not None and not r for r in results):
        return False
    return None if None in results else True


def _not(value: Value) -> Value:
    return None if value is None else not value
