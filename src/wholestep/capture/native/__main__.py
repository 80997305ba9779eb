"""Builds the native look now and says where it is, or why there is none."""

from __future__ import annotations

import sys

from wholestep.capture.native import build


def main() -> int:
    """Exit status 0 if there is a native look or it is switched off, else 1."""
    if reason := build.wait():
        print(f"no native look, the guards compare in Python: {reason}", file=sys.stderr)
        return 1
    print(build.library())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
