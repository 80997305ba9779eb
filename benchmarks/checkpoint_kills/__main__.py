"""Kills ranks at random moments of their saves and loads what is there: is it the last whole checkpoint each time?

    python -m benchmarks.checkpoint_kills --kills 30

The exit status is 1 if one of them was lost or mixed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.checkpoint_kills.killing import kills


def main() -> int:
    """Prints a line for each kill, and a sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="how many (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes save (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    options = parser.parse_args()
    good, remains = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for number, kill in enumerate(kills(Path(folder), options.kills, options.ranks, options.seed), 1):
            good += kill.is_good
            remains.update(kill.remains or ("nothing",))
            print(
                f"kill {number:2}: save {kill.told} had returned, {kill.found} was loaded, "
                f"beside it {', '.join(kill.remains) or 'nothing'}{'' if kill.is_good else '   LOST'}",
                flush=True,
            )
    print(f"{good} of {options.kills} loaded the last whole checkpoint; beside it: {dict(remains)}")
    return 0 if good == options.kills else 1


if __name__ == "__main__":
    raise SystemExit(main())
