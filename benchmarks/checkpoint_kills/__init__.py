"""In: a number of kills. Out: whether the last whole checkpoint was there after each. Ranks are ended by SIGKILL."""
