"""In: tensors. Out: Triton kernels and copies of ours, one a file. Which nodes use them is `passes`."""
