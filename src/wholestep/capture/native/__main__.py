"""Builds the native guards now and says where they are, or why there are none."""

from __future__ import annotations

import sys

from wholestep.capture.native import build


def main() -> int:
    """Exit status 0 if there are native guards or they are switched off, else 1."""
    if reason := build.wait():
        print(f"no native guards, the guards compare in Python: {reason}", file=sys.stderr)
        return 1
    print(build.library())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
