"""The model's own likely successors, asked for once and kept as a table on disk."""
