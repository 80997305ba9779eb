"""Recorded calls of one run and their tensors: they run as a piece, ahead, again, or one by one. Matches no calls."""
