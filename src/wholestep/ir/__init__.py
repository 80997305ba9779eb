"""The Program: a step as a functional graph of ATen and collective nodes. Records and edits only; no decisions."""
