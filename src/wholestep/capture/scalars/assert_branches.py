"""Branches of the user's code that do nothing but raise.

A traced value may not drive Python, since the other branch would never be seen. Of ``assert (labels >= 0).all()`` and
of ``if loss.isnan(): raise ValueError(...)`` one branch is known without running it: it raises. The trace goes on with
the other one, and the value is checked at every call (`ir/ops/assertions.py`).

Which expression asks is read from the position of the instruction that runs, and what it decides from the source.
Where another part of the same condition could decide otherwise (``if a and b: raise`` asking for ``a``), or the step
itself may catch what is raised, there is no such answer.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from types import FrameType

import torch

from wholestep.capture.python.code_owner import library_frame

_PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.Size)
_UNKNOWN = object()
_MAY_ASK = ("torch/distributions/", "torch/nn/utils/clip_grad")
"""Parts of torch that check values as user's code does."""
_TRACES, _STEP = "wholestep/capture/tracing/tracer.py", "_body"
"""Where the step is called while it is traced. Who calls the step may catch what it likes."""


@dataclass(frozen=True)
class AssertedBranch:
    """What a value has to be, and what is raised otherwise."""

    wanted: bool
    error: str
    """Module and qualified name of the exception's class, with a colon between them."""
    message: str


def asserted_branch_at(frame: FrameType | None) -> AssertedBranch | None:
    """What the truth value decides that the expression running in `frame` asks for; None if it is more than raising."""
    if frame is None or (
        library_frame(frame.f_code.co_filename) and not any(part in _slashed(frame) for part in _MAY_ASK)
    ):
        return None
    # The jump that asks has the position of the whole statement in Python 3.11; what it asks about stands before it.
    position = next(islice(frame.f_code.co_positions(), max(frame.f_lasti // 2 - 1, 0), None), None)
    found = position and _deciding(_source(frame), position)
    if not found:
        return None
    wanted, raised = found
    kind, message = _parts(raised, frame)
    if kind is None or _may_catch(frame, kind):
        return None
    return AssertedBranch(wanted, f"{kind.__module__}:{kind.__qualname__}", _text(message, frame))


def _may_catch(frame: FrameType | None, error: type[Exception]) -> bool:
    """Whether an exception ends in a frame, or in one of the step that led to it, for all that its source tells."""
    while frame is not None and not (frame.f_code.co_name == _STEP and _TRACES in _slashed(frame)):
        if not library_frame(frame.f_code.co_filename):
            for first, last, kinds in _guarded(_source(frame)):
                if first <= frame.f_lineno <= last and any(_is_kind(error, kind, frame) for kind in kinds):
                    return True
        frame = frame.f_back
    return False


def _is_kind(error: type[Exception], named: ast.expr | None, frame: FrameType) -> bool:
    """Whether an exception may be one of those that a handler names: of None, and of what is not known here, it is."""
    if isinstance(named, ast.Tuple):
        return any(_is_kind(error, one, frame) for one in named.elts)
    kind = _value(named, frame)
    return not isinstance(kind, type) or issubclass(error, kind)


def _source(frame: FrameType) -> str:
    return "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))


def _slashed(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")


@lru_cache(maxsize=256)
def _guarded(text: str) -> list[tuple[int, int, list[ast.expr | None]]]:
    """First and last lines of what may raise without the caller's seeing it, and what is caught there."""
    try:
        nodes = list(ast.walk(_tree(text)))
    except SyntaxError:
        return []
    found = []
    for node in nodes:
        kinds: list[ast.expr | None] = []
        if isinstance(node, (ast.Try, ast.TryStar)):
            kinds = [handler.type for handler in node.handlers]
        elif isinstance(node, ast.With):
            calls = (one.context_expr for one in node.items if isinstance(one.context_expr, ast.Call))
            kinds = [kind for call in calls if ast.unparse(call.func).endswith("suppress") for kind in call.args]
        if kinds and isinstance(node, (ast.Try, ast.TryStar, ast.With)):
            found.append((node.body[0].lineno, node.body[-1].end_lineno or 0, kinds))
    return found


@lru_cache(maxsize=256)
def _deciding(text: str, position: tuple[int | None, ...]) -> tuple[bool, ast.Assert | ast.Raise] | None:
    """What the expression at a position of a file has to be for nothing to be raised, and the statement that raises."""
    try:
        tree = _tree(text)
    except SyntaxError:  # a cell of a notebook, a file that has changed
        return None
    for statement, test, wanted, raised in _conditions(tree):
        if statement.lineno <= (position[0] or 0) <= (test.end_lineno or 0):
            answer = _needed(test, wanted, position)
            if answer is not None:
                return answer, raised
    return None


@lru_cache(maxsize=32)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _conditions(tree: ast.Module) -> Iterator[tuple[ast.stmt, ast.expr, bool, ast.Assert | ast.Raise]]:
    """Statement, condition, and what it has to be for the statement to raise nothing and to do nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node, node.test, True, node
        elif isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise):
            yield node, node.test, False, node.body[0]


def _needed(test: ast.expr, wanted: bool, position: tuple[int | None, ...]) -> bool | None:
    """What the part of a condition at a position has to be for the whole to be `wanted`; None if it does not follow."""
    if _place(test) == position:
        return None if isinstance(test, ast.Compare) and len(test.ops) > 1 else wanted
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _needed(test.operand, not wanted, position)
    if isinstance(test, ast.BoolOp):
        # All parts of an `and` that is true are true; one that is false may be so by any part but the last one asked.
        all_alike = wanted is isinstance(test.op, ast.And)
        for part in test.values if all_alike else test.values[-1:]:
            inner = _needed(part, wanted, position)
            if inner is not None:
                return inner
    return None


def _place(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _parts(raised: ast.Assert | ast.Raise, frame: FrameType) -> tuple[type[Exception] | None, ast.expr | None]:
    """The exception's class, and its message; None for what is no class by its name, as an exception made before."""
    if isinstance(raised, ast.Assert):
        return AssertionError, raised.msg
    call = raised.exc if isinstance(raised.exc, ast.Call) else None
    kind = _value(call.func if call else raised.exc, frame)
    known = isinstance(kind, type) and issubclass(kind, Exception)
    return kind if known else None, call.args[0] if call and call.args else None  # type: ignore[return-value]


def _text(message: ast.expr | None, frame: FrameType) -> str:
    """The message as it is while tracing, with the names of tensors in the place of their values."""
    if message is None:
        return ""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(_text(part, frame) for part in message.values)
    if isinstance(message, ast.FormattedValue):
        value = _value(message.value, frame) if message.format_spec is None and message.conversion == -1 else _UNKNOWN
        return str(value) if isinstance(value, _PLAIN) else f"{{{ast.unparse(message.value)}}}"
    value = _value(message, frame)
    return str(value) if isinstance(value, _PLAIN) else ast.unparse(message)


def _value(node: ast.expr | None, frame: FrameType) -> object:
    """The value of a name, or of a name's attribute, in a frame; `_UNKNOWN` of anything else."""
    if isinstance(node, ast.Name):
        for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if node.id in names:
                return names[node.id]
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, frame)
        return _UNKNOWN if isinstance(owner, torch.Tensor) else getattr(owner, node.attr, _UNKNOWN)
    return _UNKNOWN
