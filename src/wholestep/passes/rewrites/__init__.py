"""In: a program. Out: the same values by fewer or faster operators. No collectives are moved here."""
