"""Modules of DistributedDataParallel and ``fully_shard`` inside of compiled steps."""
