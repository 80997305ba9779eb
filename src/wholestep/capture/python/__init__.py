"""In: Python objects. Out: trees, snapshots, and whose code they are. No tensor is traced here."""
