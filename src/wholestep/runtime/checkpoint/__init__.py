"""In: live training state and a folder. Out: a whole checkpoint, or its values in shards. No graph, no pickled code."""
