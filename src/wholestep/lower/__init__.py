"""From a scheduled program to something that runs."""
