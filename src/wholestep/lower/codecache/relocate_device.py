"""What was compiled for one GPU, for another of the same kind: text and numbers, and nothing of torch.

[Note: where the number of a GPU stands]
Inductor writes the number into the module of a segment, in few forms, all of which are known (`_FORMS`): names of
devices, properties of a device, guards, streams. Nothing else of the text depends on it, and neither does what Triton
makes of its kernels: the number stands above a kernel's function, and Triton's key is made of the function. So a module
is moved by writing another number into these forms. A number next to a word like "device" that stands in none of them
may be the GPU's or not; then nothing is moved, and whoever asked compiles.
"""

from __future__ import annotations

import ast
import re

_FORMS = (
    r"cuda:",  # the name of a device
    r"type='cuda', index=",  # DeviceProperties and torch.device, as they print themselves
    r"torch\.cuda\._DeviceGuard\(",
    r"torch\.cuda\.set_device\(",
    r"get_raw_stream\(",
    r"(?:raw_)?stream",  # the variable that holds it
    r"semaphores_cuda_",  # likewise
)
_FORM = re.compile(rf"\b({'|'.join(_FORMS)})(\d+)\b")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
_HARMLESS = re.compile(r"\b(?:empty_strided_cuda|tl\.device_assert)\(")
"""Calls whose first argument is no number of a GPU, whatever it is."""
_SUSPECT = re.compile(r"\w*(?:cuda|device|gpu|stream|guard|generator)\w*[^\w\n]{0,4}(?:\w+ ?[=:] ?)?\d", re.IGNORECASE)
"""A number after a word that has to do with devices."""


class CannotRelocate(ValueError):
    """Why what was compiled for a GPU stays there."""


def relocate(text: str, old: int, new: int) -> str:
    """The module of a segment for GPU `new`, written by Inductor for GPU `old`; comments are moved, too.

    Raises CannotRelocate for a text that may name a GPU in a form that is not known, or that names another one.
    """
    code = _COMMENT.sub("", text)
    if others := {int(found[2]) for found in _FORM.finditer(code)} - {old}:
        raise CannotRelocate(f"it was compiled for GPU {old} and names GPU {min(others)}")
    rest = _HARMLESS.sub("(", _FORM.sub("it", code))
    if (found := _SUSPECT.search(rest)) is not None:
        line = rest[rest.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]
        raise CannotRelocate(f"a number of a GPU may stand in a form that is not known: {line.strip()[:200]!r}")
    return _FORM.sub(lambda form: f"{form[1]}{new if int(form[2]) == old else form[2]}", text)


def kernel_texts(module: str) -> list[str]:
    """The text of every kernel of a module, in the order in which the module gives them to Triton.

    Raises CannotRelocate for one that is not written there as a whole.
    """
    texts = []
    for node in ast.walk(ast.parse(module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            text = node.args[1] if len(node.args) > 1 else None
            if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
                raise CannotRelocate("the text of a kernel is not written in its module")
            texts.append(text.value)
    return texts


def without_device_index(text: str, number: int) -> str:
    """A text of ours, with torch.device as it prints itself, without the number of the GPU `number`."""
    return text.replace(f"device(type='cuda', index={number})", "device(type='cuda')")
