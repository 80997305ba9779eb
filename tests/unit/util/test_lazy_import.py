"""What is imported with the package, and what only where something is compiled."""

from __future__ import annotations

import subprocess
import sys


def said_by(text: str) -> str:
    """What a process prints that runs this."""
    found = subprocess.run([sys.executable, "-c", f"import sys\n{text}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_compilers_are_not_imported_with_the_package():
    """Dynamo and Inductor would take as long again as half of torch."""
    names = "('torch._dynamo', 'torch._inductor', 'torch')"
    told = said_by(
        f"import wholestep, wholestep.api.compiled_step\nprint([name for name in {names} if name in sys.modules])"
    )
    assert told == "['torch']"


def test_checkpoints_of_torch_are_imported_where_one_is_saved():
    """They would add half a second to each process."""
    told = said_by("import wholestep\nprint('torch.distributed.checkpoint' in sys.modules)")
    assert told == "False"


def test_threads_of_a_gpu_find_the_compiler_imported():
    """Its modules import each other, so two threads that begin at different ones meet in the middle."""
    text = """
import torch
from wholestep.lower import auto_backend
from wholestep.lower.codecache import toolchain_hash
wanted = ("wholestep.lower.inductor.segment_compiler", "torch._inductor.output_code", "torch._dynamo.source")
toolchain_hash.start = lambda: print(all(name in sys.modules for name in wanted))
for chosen in ("eager", "auto"):
    auto_backend.backend_for(chosen, torch.device("cuda"), None, None)
"""
    assert said_by(text) == "True"
