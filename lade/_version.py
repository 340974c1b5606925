"""The package version, read by the build and by `lade.__version__`."""

__version__ = "0.2.0"
