"""The process and its devices: generators, garbage, threads, transfers."""
