"""In: a graph. Out: facts about it (aliases, tasks, repeats, users). Nothing here changes a graph."""
