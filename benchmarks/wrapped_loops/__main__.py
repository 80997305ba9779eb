"""Runs the benchmark: `python -m benchmarks.wrapped_loops --help`."""

from benchmarks.wrapped_loops.measure import main

if __name__ == "__main__":
    main()
