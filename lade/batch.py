"""The rows of a batch: committed tokens, which rows are finished, and how far each may go."""

from collections.abc import Callable

from torch import Tensor

from lade.transfer import integers_on


class Text:
    """Prompt and emitted tokens of each row; rows grow at their own pace.

    Args:
        input_ids: int64 [rows, num_tokens], the prompts, padding included; num_tokens may be 0.
        pad_token_id: token that continues a finished row; None if rows continue with their own
            tokens until the last one is finished, as in `generate` without an EOS token.
    """

    def __init__(self, input_ids: Tensor, pad_token_id: int | None) -> None:
        self.num_rows, self.num_prompt = input_ids.shape
        self.pad_token_id = pad_token_id
        self.token_ids: list[list[int]] = input_ids.tolist()
        self.is_finished = [False] * self.num_rows
        self.num_unpadded = [self.num_prompt] * self.num_rows  # tokens before trailing padding
        self._ids = input_ids
        self._num_known = [self.num_prompt] * self.num_rows

    @property
    def longest(self) -> int:
        """Number of tokens in the longest row."""
        return max(map(len, self.token_ids))

    def num_emitted(self, row: int) -> int:
        """Return the number of tokens after the prompt."""
        return len(self.token_ids[row]) - self.num_prompt

    def padding_of(self, row: int) -> int | None:
        """Return the padding token of a finished row; None if the row still gets its own tokens."""
        return self.pad_token_id if self.is_finished[row] else None

    def append(self, row: int, token_id: int) -> None:
        """Commit a row's next token."""
        self.token_ids[row].append(token_id)
        self.num_unpadded[row] += 1

    def cut(self) -> None:
        """Cut back to the columns that all unfinished rows have, so that decoding can resume.

        If all rows are finished, the last column is dropped. Rows that ended earlier are padded.
        """
        rows = zip(self.token_ids, self.is_finished, strict=True)
        lengths = [len(ids) for ids, is_finished in rows if not is_finished]
        length = max(min(lengths, default=self.longest - 1), self.num_prompt)
        for row, token_ids in enumerate(self.token_ids):
            num_unpadded = self.num_unpadded[row]
            missing = length - len(token_ids)
            if missing > 0 and self.pad_token_id is not None:
                token_ids += [self.pad_token_id] * missing
            del token_ids[length:]
            self.is_finished[row] = self.is_finished[row] and num_unpadded <= length
            self.num_unpadded[row] = min(num_unpadded, length)
            self._num_known[row] = min(self._num_known[row], length)

    def prefix(self, row: int) -> Tensor:
        """Return a row, int64 [1, num_tokens]: a view of memory that later tokens share."""
        length = len(self.token_ids[row])
        if length > self._ids.shape[1]:
            larger = self._ids.new_zeros((self.num_rows, max(64, 2 * length)))
            larger[:, : self._ids.shape[1]] = self._ids
            self._ids = larger
        known = self._num_known[row]
        if known < length:
            new = integers_on(self._ids.device, self.token_ids[row][known:])
            self._ids[row, known:length] = new
            self._num_known[row] = length
        return self._ids[row : row + 1, :length]

    def sequences(self) -> Tensor:
        """Return all rows, int64 [rows, num_tokens], padded to the longest."""
        length, pad_token_id = self.longest, self.pad_token_id
        padded: list[int] = []
        for token_ids in self.token_ids:
            missing = length - len(token_ids)
            assert not missing or pad_token_id is not None
            padded += [*token_ids, *[pad_token_id or 0] * missing]
        ids = integers_on(self._ids.device, padded).view(self.num_rows, length)
        for row, num_known in enumerate(self._num_known):
            ids[row, :num_known] = self._ids[row, :num_known]  # processors may have changed it
        return ids


class Batch:
    """The rows of one generation, and the tokens that each may still emit.

    Args:
        text: the prompts; grows.
        contexts: each row's prompt as a drafter sees it, without padding; grows.
        max_length: maximum total length a draft may reach, prompt included. Beyond it, and until
            `stop` ends a row, steps have no draft.
        stop: called after every token with the rows that emitted it; marks rows of the text as
            finished, and passes the token on.
        gives_cache: whether the caller gets the cache, which is then to hold the whole text.
        max_lead: maximum number of tokens a row may be ahead of the shortest; None for no limit.
    """

    def __init__(
        self,
        text: Text,
        contexts: list[list[int]],
        max_length: int,
        stop: Callable[[list[int]], None],
        gives_cache: bool = False,
        max_lead: int | None = None,
    ) -> None:
        self.text, self.contexts = text, contexts
        self.stop, self.gives_cache = stop, gives_cache
        self.rows = list(range(text.num_rows))  #: rows that the target still runs
        self._max_length, self._max_lead = max_length, max_lead

    @property
    def emitting(self) -> list[int]:
        """Rows that emit in the next step."""
        return [row for row in self.rows if self.may_emit(row)]

    def may_emit(self, row: int) -> bool:
        """Return whether a row may emit one more token now."""
        if self.text.is_finished[row]:
            return False
        return self._max_lead is None or self._lead(row) < self._max_lead

    def capacity_left(self, row: int) -> int:
        """Return how many more tokens fit after a row, besides the bonus token."""
        return self._max_length - len(self.text.token_ids[row]) - 1

    def depth_left(self, row: int) -> int:
        """Return the maximum depth of a row's draft."""
        depth = self.capacity_left(row)
        if self._max_lead is not None:
            depth = min(depth, self._max_lead - self._lead(row) - 1)
        return depth

    def drop_finished(self) -> tuple[list[int], list[int]]:
        """Drop finished rows, so that no work is done for them.

        Returns:
            The indices into `rows` of the rows that stay, and the dropped rows; both empty if no
            row is dropped, as when no row would stay.
        """
        staying = [row for row in self.rows if not self.text.is_finished[row]]
        if len(staying) in (0, len(self.rows)):
            return [], []
        indices = [self.rows.index(row) for row in staying]
        leaving = [row for row in self.rows if row not in staying]
        self.rows = staying
        return indices, leaving

    def _lead(self, row: int) -> int:
        """Return the number of tokens a row is ahead of the shortest."""
        token_ids = self.text.token_ids
        return len(token_ids[row]) - min(len(token_ids[other]) for other in self.rows)
