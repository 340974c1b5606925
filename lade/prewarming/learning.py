"""Tables that grow while a model is in use: after calls, in a small share of their time.

What is learned is what `lade.prewarm` learns: the model's successors of single tokens and of pairs
in texts of its own. Nothing of a user's prompt or answer gets into a table, nor does any decide
what is learned.
"""

import warnings

from lade.attempts import Attempt
from lade.compat import Model
from lade.prewarming.run import prewarm

_SHARE = 0.02  # of the time that calls take
# Not less at once, because a table takes time to read and write; and twice as long as the last time
# until the prefix of single tokens is found, which a slow model is long about.
_LEAST_SEC = 2.0


class Learner:
    """Adds to a model's table after its calls, for 2 % of the time that they take.

    A failure is told once and ends the learning: no call fails because of it.
    """

    def __init__(self) -> None:
        self._sec = 0.0  # to learn for
        self._least_sec = _LEAST_SEC
        # Taken by the thread that learns. A list, because locks cannot be copied with a model.
        self._turn = [True]

    def after_call(self, model: Model, sec: float) -> None:
        """Learn, if a share of all calls since the last time is long enough."""
        self._sec += _SHARE * sec
        if self._sec < self._least_sec:
            return
        try:
            self._turn.pop()
        except IndexError:  # another thread learns, or learning has failed
            return
        sec, self._sec = self._sec, 0.0
        attempt = Attempt(even_memory=True)
        try:
            with attempt:
                made = prewarm(model, sec)
                self._least_sec = _LEAST_SEC if made.has_prefix else 2 * self._least_sec
        finally:
            if attempt.failure is None:
                self._turn.append(True)
        if attempt.failure is not None:
            warnings.warn(
                f"lade learns nothing more of {type(model).__name__}: {attempt.failure}",
                stacklevel=2,
            )
