"""In: tensors. Out: our custom operators, each with a fake kernel. Facts about operators of torch stay in `ir`."""
