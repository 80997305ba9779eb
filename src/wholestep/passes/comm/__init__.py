"""In: reductions of gradients. Out: buckets, wire formats and updates per bucket. Their order is `passes/schedule`."""
