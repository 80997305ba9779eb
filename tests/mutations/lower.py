"""Faults of backends: what the host computes for CUDA graphs."""

from __future__ import annotations

from mutations import Mutation

HOST = "tests/unit/lower/cudagraph/parts/test_host_part.py"

LOWER_MUTATIONS = (
    Mutation(
        name="zeros_of_both_signs_are_one",
        what="0.0 and -0.0 count as the same number",
        file="lower/cudagraph/host_part.py",
        old="first.setdefault(number, place) if number else place for",
        new="first.setdefault(number, place) for",
        tests=(f"{HOST}::test_which_numbers_are_equal", f"{HOST}::test_results_are_the_same_bits"),
    ),
    Mutation(
        name="numbers_of_all_dtypes_are_compared",
        what="3 and 3.0 count as the same number",
        file="lower/cudagraph/host_part.py",
        old="by_dtype.setdefault(node_meta.tensor(node.args[0]).dtype, {})[node] = None",
        new="by_dtype.setdefault(torch.float32, {})[node] = None",
        tests=(f"{HOST}::test_numbers_of_another_dtype_are_not_equal",),
    ),
    Mutation(
        name="numbers_are_read_before_they_are_written",
        what="numbers that the step reads behind a write with another number are read in front of it",
        file="lower/cudagraph/host_part.py",
        old="                end = place\n                break\n",
        new="                continue\n",
        tests=(f"{HOST}::test_what_is_written_with_a_number_is_read_behind_it",),
    ),
    Mutation(
        name="any_two_numbers_are_equal",
        what="numbers that differ in one place are computed with as if they did not",
        file="lower/cudagraph/host_part.py",
        old="numbers.count(numbers[0]) == len(numbers):",
        new="numbers.count(numbers[0]) > 1:",
        tests=(f"{HOST}::test_results_are_the_same_bits",),
    ),
)
