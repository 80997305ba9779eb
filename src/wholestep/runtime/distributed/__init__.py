"""In: processes. Out: groups, launch, consensus and named failures. No programs but their text."""
