"""What is imported with the package, and what only where something is compiled."""

from __future__ import annotations

import subprocess
import sys


def test_compilers_are_not_imported_with_the_package():
    """Dynamo and Inductor would take as long again as half of torch."""
    told = "print([name for name in ('torch._dynamo', 'torch._inductor', 'torch') if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys, wholestep, wholestep.step; {told}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "['torch']"
