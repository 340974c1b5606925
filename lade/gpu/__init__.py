"""Steps of fixed shape, on memory kept between calls: recorded as CUDA graphs and replayed.

Trees of the exact size are run by `lade.targets`; `lade.probing` decides which a call gets.
"""
