"""Where tensors live on the mesh, and which collectives that needs."""
