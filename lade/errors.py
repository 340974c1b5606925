"""What can go wrong beyond ValueError and TypeError. Every message names the thing at fault."""


class LadeError(Exception):
    """Base class of the errors of this package."""


class UnsupportedModelError(LadeError):
    """This model cannot verify drafts in the way asked for; raised before anything is generated."""


class UnsupportedOptionError(LadeError, ValueError):
    """A generation option that cannot be honoured; raised before anything is generated."""


class PlainDecodingWarning(UserWarning):
    """A model or a call leaves no way to verify drafts, and is decoded one token a forward."""


class MisfitError(ValueError):
    """Arguments of a call that do not fit each other, which plain decoding would run into, too."""


class VerificationWarning(PlainDecodingWarning):
    """Drafts could not be verified any more in the middle of a call; the rest of it is plain."""


class DrafterWarning(UserWarning):
    """A drafter failed, or drafted what is no draft; the call goes on without it."""


class EagerExecutionWarning(UserWarning):
    """Steps cannot be of fixed shape, or not be recorded; the text is the same."""


class ModelFetchError(LadeError):
    """An embedded model could not be fetched, checked, converted or stored."""


class MissingExtraError(LadeError, ImportError):
    """An optional dependency is not installed; the message has the pip line."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(
            f"this needs the package {module!r}, which is not installed; "
            f'install it with: pip install "lade-decoding[{extra}]"'
        )
