"""The idioms, a file for each group."""

from benchmarks.idioms.groups import (
    autograd_uses,
    batches,
    containers,
    hooks_and_modules,
    masks_and_lengths,
    objects_and_libraries,
    optimizers_and_scalers,
    printing_and_meters,
    random_numbers,
    reads_and_branches,
    rl_and_gan,
    schedulers,
)

FILES = (
    printing_and_meters,
    containers,
    random_numbers,
    reads_and_branches,
    schedulers,
    optimizers_and_scalers,
    masks_and_lengths,
    autograd_uses,
    batches,
    objects_and_libraries,
    hooks_and_modules,
    rl_and_gan,
)

GROUPS = {file.__name__.rpartition(".")[2]: (file.__doc__ or "").splitlines()[0] for file in FILES}
"""Name of a file -> what its idioms have in common, in the order of the table."""
