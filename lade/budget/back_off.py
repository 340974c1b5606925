"""How often to try again what does not pay."""


class BackOff:
    """Lets what does not pay be tried for a small share of what passes without it.

    Steps or seconds, as its user counts. Nothing is drawn at random.

    Args:
        share: of what passes that trials may take.
        first: what they may take before any has passed.
        most: what is saved up for them at most.
    """

    def __init__(self, share: float, first: float, most: float) -> None:
        self.left = first
        self._share = share
        self._most = most

    def passed(self, amount: float) -> None:
        """Save up for trials."""
        if self.left < self._most:
            self.left = min(self._most, self.left + self._share * amount)

    def spent(self, amount: float) -> None:
        """Take a trial into account that did not pay."""
        self.left -= amount

    def granted(self, amount: float) -> None:
        """Let trials take so much, at least: what is tried looks promising."""
        self.left = max(self.left, amount)
