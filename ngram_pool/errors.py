"""Errors of pool files, and of writing to a read-only pool."""


class PoolFileError(ValueError):
    """A file is no pool, is damaged, or has another tokenizer; the message says what and where."""


class NewerPoolFileError(PoolFileError):
    """A file has the format of a newer version, which this version cannot read."""


class ReadOnlyPoolError(TypeError):
    """A read-only pool was asked to learn."""
