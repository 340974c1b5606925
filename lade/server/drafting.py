"""What a request may say of drafts: whether there are any, and how many tokens they have."""

from dataclasses import replace

from lade.config import Config
from lade.server.errors import ApiError
from lade.server.exchange import Asked

# Draft tokens of a step that a request may ask for where the server sets no number: others wait
# for its steps.
_MOST_DRAFT_TOKENS = 64
# The same where all steps have one width, which depends on the number from this one on.
_MOST_OF_STABLE_TEXT = 7


def config_for(asked: Asked, config: Config) -> Config:
    """Return the config of a request's call.

    Args:
        asked: the request.
        config: of the server.

    Raises:
        ApiError: fields contradict each other, or more is asked for than the server allows.
    """
    most, wanted = config.max_draft_tokens, asked.max_draft_tokens
    if config.stable_text and (most is not None or config.lookahead is not None):
        # Near-ties depend on the width of steps, which these would change.
        for name, is_asked in (
            ("speculation", not asked.speculates),
            ("max_draft_tokens", wanted is not None),
        ):
            if is_asked:
                raise ApiError(400, f"expected no {name}: the texts are kept stable", param=name)
    if not asked.speculates:
        config = replace(config, lookahead=None)
        for name in ("prediction", "max_draft_tokens"):
            if getattr(asked, name) is not None:
                raise ApiError(400, f"expected {name} or speculation=false, got both", param=name)
        wanted = 0
    if wanted is None:
        return config
    if most is None:
        most = _MOST_OF_STABLE_TEXT if config.stable_text else _MOST_DRAFT_TOKENS
    if wanted > most:
        raise ApiError(
            400,
            f"expected max_draft_tokens of at most {most}, got {wanted}",
            param="max_draft_tokens",
        )
    return replace(config, max_draft_tokens=wanted, step_costs=None)
