"""In: a trainer of another library. Out: its own loop, in which each step is one compiled call. None imports one here."""
