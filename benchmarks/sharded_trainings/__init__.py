"""Small trainings under every sharded strategy, against eager DistributedDataParallel. No timings."""
