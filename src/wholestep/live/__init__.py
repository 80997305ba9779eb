"""Live steps: their own Python runs at every call, calls of torch run as compiled pieces. No stage is called here."""
