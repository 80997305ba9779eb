"""In: modules that bring their own communication. Out: what their owner set, and silence while a trace runs."""
