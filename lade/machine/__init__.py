"""State of the process that all calls share: random generators, captures, garbage collection."""
