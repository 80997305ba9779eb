"""In: a placed program. Out: a scheduled one, by the one list of passes. A pass is a function Program -> Program."""
