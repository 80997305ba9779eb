"""In: operators a compiler cannot take well. Out: the same in operators it can. No compiling here."""
