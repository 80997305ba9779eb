"""Steps whose batches have other sizes in each call."""
