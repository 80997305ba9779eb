"""The other ranks of a live step: what all do alike, reduce and tell each other; shards. Runs no Python."""
