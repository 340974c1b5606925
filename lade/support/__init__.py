"""Which architectures this package decodes exactly: tried on tiny models with random weights."""
