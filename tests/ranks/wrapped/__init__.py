"""Modules that bring their own communication: DistributedDataParallel and ``fully_shard``."""
