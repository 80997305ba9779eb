"""In: state and arguments of a call. Out: whether they are unchanged, in C++. Why they changed is `capture/guards`."""
