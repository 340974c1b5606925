"""What can be wrong with a pool's file, or with writing to a pool."""


class PoolFileError(ValueError):
    """A file is no pool, is damaged, or belongs to another tokenizer; it says what, and where."""


class NewerPoolFileError(PoolFileError):
    """A file has a format of a newer version, which this one cannot read; it may well be whole."""


class ReadOnlyPoolError(TypeError):
    """A pool that is only read was to learn."""
