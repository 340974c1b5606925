"""Steps of fixed shape, on memory kept between calls: recorded as CUDA graphs and replayed.

`lade.targets` runs trees at their exact size; `lade.probing` decides between the two for each call.
"""
