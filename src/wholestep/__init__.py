"""wholestep: an ordinary PyTorch training step as one graph, spread over a mesh, with its communication scheduled."""
