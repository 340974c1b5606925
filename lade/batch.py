"""The committed tokens of every row of a batch, and which rows are finished."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Text:
    """Prompt and emitted tokens, row by row; rows grow at their own pace.

    Args:
        input_ids: int64 [rows, num_tokens], the prompts, padding included; may have no tokens.
        pad_token_id: what a finished row goes on with, or None where rows go on with tokens of
            their own until the last one is finished, as `generate` has it without an EOS token.
    """

    def __init__(self, input_ids: Tensor, pad_token_id: int | None) -> None:
        self.num_rows, self.num_prompt = input_ids.shape
        self.pad_token_id = pad_token_id
        self.token_ids: list[list[int]] = input_ids.tolist()
        self.is_finished = [False] * self.num_rows
        self.num_unpadded = [self.num_prompt] * self.num_rows  # tokens before the padding behind
        self._ids = input_ids
        self._num_known = [self.num_prompt] * self.num_rows

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.token_ids))

    def num_emitted(self, row: int) -> int:
        """Return the number of tokens behind the prompt."""
        return len(self.token_ids[row]) - self.num_prompt

    def padding_of(self, row: int) -> int | None:
        """Return the token that is all a row still gets, None where it gets its own tokens."""
        return self.pad_token_id if self.is_finished[row] else None

    def append(self, row: int, token_id: int) -> int:
        """Commit the next token of a row, or padding where it is finished; return which."""
        padding = self.padding_of(row)
        if padding is None:
            self.num_unpadded[row] += 1
        else:
            token_id = padding
        self.token_ids[row].append(token_id)
        return token_id

    def cut(self) -> None:
        """Go back to the columns that all rows have, for somebody to go on from there.

        Where all rows are finished, that is before the last column. A row that is finished by then
        gets its padding.
        """
        length = self.longest - 1
        if not all(self.is_finished):
            rows = zip(self.token_ids, self.is_finished, strict=True)
            length = min(len(token_ids) for token_ids, is_finished in rows if not is_finished)
        length = max(length, self.num_prompt)
        for row, token_ids in enumerate(self.token_ids):
            num_own = self.num_unpadded[row]
            is_ended = self.is_finished[row] and num_own <= length
            missing = length - len(token_ids)
            if missing > 0 and self.pad_token_id is not None:
                token_ids += [self.pad_token_id] * missing
            del token_ids[length:]
            self.is_finished[row] = is_ended
            self.num_unpadded[row] = min(num_own, length)
            self._num_known[row] = min(self._num_known[row], length)

    def prefix(self, row: int) -> Tensor:
        """Return a row, int64 [1, num_tokens]; a view of memory that later tokens go to."""
        length = len(self.token_ids[row])
        if length > self._ids.shape[1]:
            larger = self._ids.new_zeros((self.num_rows, max(64, 2 * length)))
            larger[:, : self._ids.shape[1]] = self._ids
            self._ids = larger
        known = self._num_known[row]
        if known < length:
            new = torch.tensor(self.token_ids[row][known:], device=self._ids.device)
            self._ids[row, known:length] = new
            self._num_known[row] = length
        return self._ids[row : row + 1, :length]

    def prefixes(self, rows: Sequence[int]) -> Tensor:
        """Return all rows as one tensor, int64 [rows, num_tokens]; they must be of one length."""
        assert list(rows) == list(range(self.num_rows))
        parts = [self.prefix(row) for row in rows]
        assert len({part.shape for part in parts}) == 1
        # Contiguous, as `generate` has it: who sees all rows may be anybody's code.
        return self._ids[:, : parts[0].shape[1]].contiguous()

    def adopt(self, prefixes: Tensor) -> None:
        """Keep what somebody has written into such rows, as `generate` does."""
        mine = self._ids[:, : prefixes.shape[1]]
        if mine.data_ptr() != prefixes.data_ptr():
            mine.copy_(prefixes)

    def sequences(self) -> Tensor:
        """Return all rows, int64 [rows, num_tokens], short ones padded to the longest."""
        length, pad_token_id = self.longest, self.pad_token_id
        rows = []
        for token_ids in self.token_ids:
            missing = length - len(token_ids)
            assert not missing or pad_token_id is not None
            rows.append([*token_ids, *[pad_token_id or 0] * missing])
        ids = torch.tensor(rows, dtype=torch.int64, device=self._ids.device)
        for row, num_known in enumerate(self._num_known):
            ids[row, :num_known] = self._ids[row, :num_known]  # processors may have written there
        return ids
