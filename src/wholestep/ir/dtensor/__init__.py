"""In: tensors cut over ranks, as DTensors. Out: their parts for a graph, fakes for a trace. No module, no optimizer."""
