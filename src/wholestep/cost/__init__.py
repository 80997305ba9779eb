"""Predicted times: of a node of the graph on a device, of a collective on a link. No plan is made here."""
