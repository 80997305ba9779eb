"""In: calls on lists of tensors. Out: one multi-tensor kernel for each kind. Single tensors are Inductor's."""
