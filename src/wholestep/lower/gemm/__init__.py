"""In: shapes of a matrix product. Out: the fastest library call for it. No other operators."""
