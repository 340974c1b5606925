"""Check a grammar in another process, with limits of time and memory.

A schema of a few bytes may take minutes or gigabytes, such as `allOf` with thirty patterns, and a
thread cannot be stopped.
"""

import os
import subprocess
import sys
from functools import lru_cache

import llguidance

#: llguidance's limit that bounds memory: each state of a lexer takes 2 kB.
LIMITS = llguidance.LLParserLimits(
    max_lexer_states=20_000, precompute_large_lexemes=False, verbose_errors=False
)
# 2,000 properties take a third of a second, and the start of the process a tenth.
_CPU_SEC, _WALL_SEC = 1, 60.0  # on a busy machine, a second of work may take a minute
_MEMORY_BYTES = 2**30
_NICENESS = 5  # the model goes first


@lru_cache(1024)  # valid grammars alone
def check(grammar: str, tenant: str) -> None:
    """Check a grammar, once for each tenant.

    Raises:
        ValueError: there is something wrong with it, or it takes too much.
    """
    command = [sys.executable, "-P", "-m", __name__]
    try:
        # No standard error: warnings would show the schema of the request.
        done = subprocess.run(
            command, input=grammar.encode(), capture_output=True, timeout=_WALL_SEC, check=True
        )
    except subprocess.SubprocessError:
        raise ValueError("it takes too much time or memory") from None
    if done.stdout:
        raise ValueError(done.stdout.decode())


def _look() -> None:
    if sys.platform != "win32":
        import resource

        os.nice(_NICENESS)
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SEC, _CPU_SEC))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, sys.stdin.read(), log_level=0, limits=LIMITS)
    matcher.compute_bitmask()  # some slow grammars are found only here
    sys.stdout.write(matcher.get_error())


if __name__ == "__main__":
    _look()
