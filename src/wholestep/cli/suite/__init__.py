"""`wholestep bench --suite`: one training, ours against every stock way, by turns in one process group."""
