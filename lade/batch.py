"""The rows of a batch: the committed tokens of each, and how far it may run ahead of the others."""

import sys

from torch import Tensor

from lade.machine.transfer import integers_on


class Row:
    """A row of a batch: its prompt, and the tokens emitted after it; it grows at its own pace.

    Args:
        index: of the row in the batch.
        ids: int64 [1, num_tokens], the prompt, padding included; num_tokens may be 0.

    Attributes:
        token_ids: all tokens, padding included.
        context: the tokens as a drafter sees them, without padding; empty until there is one.
        is_finished: whether a stop condition has ended it.
    """

    def __init__(self, index: int, ids: Tensor) -> None:
        self.index = index
        self.token_ids: list[int] = ids[0].tolist()
        self.context: list[int] = []
        self.num_prompt = self._num_known = len(self.token_ids)
        self._num_padding = 0  # behind the text
        self.is_finished = False
        self._ids = ids

    @property
    def num_emitted(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_unpadded(self) -> int:
        """Number of tokens before trailing padding."""
        return len(self.token_ids) - self._num_padding

    def cut(self, length: int, pad_token_id: int | None) -> None:
        """Cut or pad the row to a length; it goes on if tokens of its own are cut."""
        num_unpadded, missing = self.num_unpadded, length - len(self.token_ids)
        if missing > 0 and pad_token_id is not None:
            self.token_ids += [pad_token_id] * missing
        del self.token_ids[length:]
        self.is_finished = self.is_finished and num_unpadded <= length
        self._num_padding = len(self.token_ids) - min(num_unpadded, length)
        self._num_known = min(self._num_known, length)

    def prefix(self) -> Tensor:
        """Return all tokens, int64 [1, num_tokens]: a view of memory that later tokens share."""
        length, known = len(self.token_ids), self._num_known
        if length > self._ids.shape[1]:
            larger = self._ids.new_zeros((1, max(64, 2 * length)))
            larger[:, : self._ids.shape[1]] = self._ids
            self._ids = larger
        if known < length:
            self._ids[0, known:length] = integers_on(self._ids.device, self.token_ids[known:])
            self._num_known = length
        return self._ids[:, :length]

    @property
    def known(self) -> Tensor:
        """The tokens that `prefix` has returned, int64 [num_known]; processors may change them."""
        return self._ids[0, : self._num_known]


class Batch:
    """The rows of one generation.

    Args:
        input_ids: int64 [rows, num_tokens], the prompts, padding included; num_tokens may be 0.
        pad_token_id: token that continues a finished row; None if rows continue with their own
            tokens until the last one is finished, as in `generate` without an EOS token.

    Attributes:
        running: the rows that the target still runs.
        max_lead: maximum number of tokens a row may be ahead of the shortest; None for no limit.
    """

    def __init__(self, input_ids: Tensor, pad_token_id: int | None) -> None:
        self.num_prompt = input_ids.shape[1]
        self.rows = [Row(row, input_ids[row : row + 1]) for row in range(len(input_ids))]
        self.running = [*self.rows]
        self.pad_token_id = pad_token_id
        self.max_lead: int | None = None
        self._device = input_ids.device

    @property
    def longest(self) -> int:
        """Number of tokens in the longest row."""
        return max(len(row.token_ids) for row in self.rows)

    @property
    def emitting(self) -> list[Row]:
        """Rows that emit in the next step."""
        return [row for row in self.running if not row.is_finished and self.lead_left(row) > 0]

    def column(self, index: int) -> list[int] | None:
        """Return the tokens of a column, or None until each row has its own or is finished."""
        column: list[int] = []
        for row in self.rows if index < self.longest else ():
            if index < len(row.token_ids):
                column.append(row.token_ids[index])
            elif row.is_finished and self.pad_token_id is not None:
                column.append(self.pad_token_id)
        return column if len(column) == len(self.rows) else None

    def lead_left(self, row: Row) -> int:
        """Return how many tokens a row may emit until it must wait for the shortest."""
        if self.max_lead is None:
            return sys.maxsize
        shortest = min(len(other.token_ids) for other in self.running)
        return self.max_lead + shortest - len(row.token_ids)

    def drop_finished(self) -> list[Row]:
        """Stop running finished rows, unless no row would be left; return them."""
        leaving = [row for row in self.running if row.is_finished]
        if len(leaving) in (0, len(self.running)):
            return []
        self.running = [row for row in self.running if not row.is_finished]
        return leaving

    def cut(self) -> None:
        """Cut back to the columns that all unfinished rows have, so that decoding can resume.

        If all rows are finished, the last column is dropped. Rows that ended earlier are padded.
        """
        lengths = [len(row.token_ids) for row in self.rows if not row.is_finished]
        length = max(min(lengths, default=self.longest - 1), self.num_prompt)
        for row in self.rows:
            row.cut(length, self.pad_token_id)

    def sequences(self) -> Tensor:
        """Return all rows, int64 [rows, num_tokens], padded to the longest."""
        length, padded = self.longest, list[int]()
        for row in self.rows:
            missing = length - len(row.token_ids)
            assert not missing or self.pad_token_id is not None
            padded += [*row.token_ids, *[self.pad_token_id or 0] * missing]
        ids = integers_on(self._device, padded).view(len(self.rows), length)
        for row in self.rows:
            ids[row.index, : len(row.known)] = row.known
        return ids
