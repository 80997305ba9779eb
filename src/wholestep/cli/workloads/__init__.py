"""Models, data and timing loops that commands run. No options and no printing."""
