"""In: a number of kills. Out: whether the last whole checkpoint was there behind each. Ranks are ended by SIGKILL."""
