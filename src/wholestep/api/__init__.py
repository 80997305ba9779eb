"""In: what the user writes. Out: a compiled step: options, stages, dispatch. The stages themselves are below."""
