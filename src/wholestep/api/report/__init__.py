"""In: programs of any stage. Out: `explain()`. Nothing is changed here."""
