"""In: a trace and live objects. Out: where each input comes from and each output goes. No decision to retrace."""
