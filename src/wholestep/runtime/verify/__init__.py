"""In: a scheduled program. Out: its run on simulated ranks, compared with eager. Nothing of the user's changes."""
