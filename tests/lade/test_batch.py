"""Text grows row by row."""

import pytest

from tests.lade.test_verify import text_of


def test_text_grows_row_by_row_and_pads_what_is_finished() -> None:
    text = text_of([3, 1], [4, 1], pad_token_id=0)
    for number in range(100):
        assert text.append(0, number) == number
        assert text.prefix(0).tolist() == [[3, 1, *range(number + 1)]]
    text.append(1, 8)
    text.is_finished[1] = True
    assert text.append(1, 9) == 0
    assert text.num_unpadded == [102, 3]
    assert text.prefix(1).tolist() == [[4, 1, 8, 0]]
    assert (text.longest, text.num_emitted(1)) == (102, 2)
    assert text.sequences().tolist() == [[3, 1, *range(100)], [4, 1, 8, *[0] * 99]]
    with pytest.raises(AssertionError):
        text.prefixes([0, 1])
    assert text_of([3, 1], [4, 1]).prefixes([0, 1]).tolist() == [[3, 1], [4, 1]]


def test_a_finished_row_without_padding_goes_on_with_its_own_tokens() -> None:
    text = text_of([3], [4])
    text.is_finished[0] = True
    assert text.append(0, 7) == 7
    assert text.append(1, 8) == 8
    assert text.sequences().tolist() == [[3, 7], [4, 8]]
