"""In: a training's name. Out: ours against every stock way, by turns in one process group."""
