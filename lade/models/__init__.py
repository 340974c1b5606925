"""Models for the command line: loading any, and the embedded ones from the package index."""
