"""The process and its devices: generators, captures, garbage, threads, transfers."""
