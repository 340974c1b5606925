"""Steps of fixed shape on memory that lives between calls, recorded as CUDA graphs and replayed."""
