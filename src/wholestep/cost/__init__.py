"""In: shapes, bytes, a device. Out: predicted microseconds and bytes as plain numbers. No plan is made here."""
