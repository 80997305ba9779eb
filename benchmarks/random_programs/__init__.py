"""Random training steps over random object graphs, compiled against eager code."""
