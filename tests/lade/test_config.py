"""Settings that mean nothing are refused."""

from typing import Any

import pytest

from lade import Config


def test_config_refuses_what_it_cannot_mean() -> None:
    assert Config() == Config(None, None, "exact")
    wrong: list[dict[str, Any]] = [
        {"max_candidates": 0},
        {"max_draft_tokens": -1},
        {"max_draft_tokens": 2**16 + 1},  # whose memory there may not be
        {"max_prefix_bytes": -1},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match=r"expected Config\(max_"):
            Config(**options)
    with pytest.raises(TypeError, match=r"expected Config\(max_candidates=…\) to be an integer"):
        Config(max_candidates=2.0)  # type: ignore[arg-type]
    for switch in ("reuses_prefix", "uses_kernels"):
        with pytest.raises(TypeError, match=rf"expected Config\({switch}=…\) to be a bool, got 1"):
            Config(**{switch: 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of 'eager', 'static', None, got 'graphs'"):
        Config(execution="graphs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of at most 63 beside execution='static', got 64"):
        Config(execution="static", max_draft_tokens=64)
    with pytest.raises(ValueError, match="of 'exact', 'rejection', got 'typical'"):
        Config(acceptance="typical")  # type: ignore[arg-type]
