"""In: a scheduled program. Out: a function that runs it. The program is not planned again here."""
