"""Jinja as chat templates expect it, for templates that nobody vouches for.

On top of Jinja's own sandbox (no way to internals, no change of values, ranges up to 100,000) a
rendering is bounded in time and in the length of every value that an operator, filter, call or
block builds. What would jump over the length in one step, by a width or a count, is left out.
Not bounded: the text of a list that holds the same lists again and again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateRuntimeError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0  # of processor time: a busy machine refuses nothing that an idle one renders
MAX_LENGTH = 1 << 24  # characters of a string, items of a list
MAX_BITS = 1 << 12  # of an integer

_FILTERS_LEFT_OUT = ("batch", "center", "format", "indent", "round", "slice", "sum", "wordwrap")
_METHODS_LEFT_OUT = {
    *("center", "encode", "expandtabs", "format", "format_map"),
    *("ljust", "rjust", "to_bytes", "translate", "zfill"),
}


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering; its time starts to run when it is made."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlock],
        )
        self._deadline = time.thread_time() + MAX_SECONDS
        for name in _FILTERS_LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.filters["join"] = lambda items, by="": self._join(str(by), map(str, items))
        self.filters["replace"] = lambda text, *args: self._replace(str(text), *args)
        self.filters["bounded"] = _at_run_time(self.bounded)
        self.filters["metered"] = _at_run_time(lambda items: map(self.bounded, items))
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def prompt(self, template: str, **variables: Any) -> str:
        """The text of `template`."""
        parts: list[str] = []
        length = 0
        for part in self.from_string(template).generate(**variables):
            parts.append(self.bounded(part))
            length += len(part)
            self._check_length(length)
        return "".join(parts)

    def bounded(self, value: Any) -> Any:
        """`value`, unless it is too long or the time is over. Raises SecurityError."""
        if time.thread_time() > self._deadline:
            raise SecurityError(f"rendering takes longer than {MAX_SECONDS:g} s")
        if isinstance(value, Sized):
            self._check_length(len(value))
        elif isinstance(value, int):
            self._check_length(value.bit_length(), MAX_BITS)
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", None)
        if isinstance(text, str) and name in ("join", "replace"):
            method = __self._join if name == "join" else __self._replace
            return method(text, *args)
        return __self.bounded(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is left out")
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, Sized) and isinstance(count, int):
                    self._check_length(len(value) * count)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_length(left.bit_length() * right, MAX_BITS)
        return self.bounded(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _METHODS_LEFT_OUT and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """No `format` methods: widths make them unbounded (see `_METHODS_LEFT_OUT`)."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Parser(self, source, name, filename).parse()
        _Bounding().visit(tree)
        return tree

    def _check_length(self, length: int, limit: int = MAX_LENGTH) -> None:
        if length > limit:
            raise SecurityError(f"a value of length {length}; the limit is {limit}")

    def _join(self, separator: str, items: Iterable[str]) -> str:
        parts = list(items)
        self._check_length(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)

    def _replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        self._check_length(len(text) + text.count(old) * len(new))
        return text.replace(old, new, count)


class _Bounding(NodeTransformer):
    """Passes what a template builds through the filters `bounded` and `metered`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered("metered", node.iter, node)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("bounded", node, node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("bounded", node, node)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filtered("bounded", node.filter, node)
        return node


def _filtered(name: str, node: Any, place: nodes.Node) -> nodes.Filter:
    return nodes.Filter(
        node, name, [], [], None, None, lineno=place.lineno, environment=place.environment
    )


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a model is trained on; for rendering it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _at_run_time(filter: Callable[[Any], Any]) -> Callable[[Context, Any], Any]:
    """A filter that Jinja does not apply while it compiles, where no bound would be in force."""
    return pass_context(lambda _, value: filter(value))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRuntimeError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and not (isinstance(indent, int) and indent <= 16):
        raise SecurityError("tojson: indent is a number up to 16")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
