"""Tables that grow while a model is in use: after calls, in a small share of their time.

What is learned is what `lade.prewarm` learns: the model's successors of single tokens and of pairs
in texts of its own. Nothing of a user's prompt or answer gets into a table, nor does any decide
what is learned.
"""

import warnings
from pathlib import Path

from lade.compat import Model
from lade.errors import in_one_line
from lade.prewarming.run import prewarm

_SHARE = 0.02  # of the time that calls take
# Not less at once, because a table takes time to read and write; and twice as long as the last time
# until the prefix of single tokens is found, which a slow model is long about.
_LEAST_SEC = 2.0


class Learner:
    """Adds to a model's table after its calls, for 2 % of the time that they take.

    A failure is told once and ends the learning: no call fails because of it.

    Args:
        folder: of the tables; None for the user's cache.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._sec = 0.0  # to learn for
        self._least_sec = _LEAST_SEC
        # Taken by the thread that learns. A list, because locks cannot be copied with a model.
        self._turn = [True]

    def after_call(self, model: Model, sec: float) -> None:
        """Learn, if a share of all calls since the last time is long enough.

        Args:
            model: the model that was called.
            sec: how long the call took.
        """
        self._sec += _SHARE * sec
        if self._sec < self._least_sec:
            return
        try:
            self._turn.pop()
        except IndexError:  # another thread learns, or learning has failed
            return
        sec, self._sec = self._sec, 0.0
        try:
            made = prewarm(model, sec, folder=self._folder)
            self._least_sec = _LEAST_SEC if made.has_prefix else 2 * self._least_sec
        except Exception as error:
            warnings.warn(
                f"lade learns nothing more of {type(model).__name__}: {in_one_line(error)}",
                stacklevel=2,
            )
            return
        except BaseException:
            self._turn.append(True)
            raise
        self._turn.append(True)
