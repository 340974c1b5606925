"""Choose experts, and group tokens by expert: compiled functions of integers and scores.

Experts are chosen as by `torch.topk`, also among equal values and in the same order. torch leaves
that to algorithms of the C++ library, so their steps are repeated here.
"""

from lade.forward._tiles import compiled

_SORTED_WHOLE = 64  # torch sorts a heap if there are so many times more values than choices


@compiled
def _is_before(values, first, second):  # type: ignore[no-untyped-def]
    """Return whether a value, by its number, comes before another: NaN, then the largest."""
    mine, theirs = values[first], values[second]
    return mine > theirs or (mine != mine and theirs == theirs)


@compiled
def _swap(order, first, second):  # type: ignore[no-untyped-def]
    order[first], order[second] = order[second], order[first]


@compiled
def _insert(values, order, first, last):  # type: ignore[no-untyped-def]
    """Sort a few values; equal values stay in their order."""
    for index in range(first + 1, last):
        number = order[index]
        while index > first and _is_before(values, number, order[index - 1]):
            order[index] = order[index - 1]
            index -= 1
        order[index] = number


@compiled
def _sink(values, order, hole, size, number):  # type: ignore[no-untyped-def]
    """Put a number into a heap whose entry `hole` is free; the last in the order is on top."""
    top, child = hole, hole
    while child < (size - 1) // 2:
        child = 2 * (child + 1)
        if _is_before(values, order[child], order[child - 1]):
            child -= 1
        order[hole] = order[child]
        hole = child
    if size % 2 == 0 and child == (size - 2) // 2:
        child = 2 * (child + 1)
        order[hole] = order[child - 1]
        hole = child - 1
    while hole > top and _is_before(values, order[(hole - 1) // 2], number):
        order[hole] = order[(hole - 1) // 2]
        hole = (hole - 1) // 2
    order[hole] = number


@compiled
def _select_by_heap(values, order, num, last):  # type: ignore[no-untyped-def]
    """Bring the first `num` in the order of values to the front, as a heap."""
    for parent in range((num - 2) // 2, -1, -1):
        _sink(values, order, parent, num, order[parent])
    for index in range(num, last):
        if _is_before(values, order[index], order[0]):
            number = order[index]
            order[index] = order[0]
            _sink(values, order, 0, num, number)


@compiled
def _split(values, order, first, last):  # type: ignore[no-untyped-def]
    """Move values before a median of three to the front; return the index of the others."""
    low, middle, high = first + 1, first + (last - first) // 2, last - 1
    if _is_before(values, order[low], order[middle]):
        inner, outer = middle, low
    else:
        inner, outer = low, middle
    if _is_before(values, order[inner], order[high]):
        median = inner
    else:
        median = high if _is_before(values, order[outer], order[high]) else outer
    _swap(order, first, median)
    left, right = first + 1, last
    while True:
        while _is_before(values, order[left], order[first]):
            left += 1
        right -= 1
        while _is_before(values, order[first], order[right]):
            right -= 1
        if left >= right:
            return left
        _swap(order, left, right)
        left += 1


@compiled
def select(values, order, num, is_sorted):  # type: ignore[no-untyped-def]
    """Write the indices of all values, the `num` largest first, in the order of `torch.topk`.

    With `sorted`, `num` is at most 17: the C++ library sorts more values in another way.
    """
    last = len(values)
    for index in range(last):
        order[index] = index
    if num * _SORTED_WHOLE <= last:
        _select_by_heap(values, order, num, last)
        for end in range(num - 1, 0, -1):
            number = order[end]
            order[end] = order[0]
            _sink(values, order, 0, end, number)
        return
    first, depth = 0, 0
    while last >> (depth // 2 + 1) > 0:
        depth += 2
    while last - first > 3:
        if depth == 0:
            _select_by_heap(values, order[first:], num - first, last - first)
            _swap(order, first, num - 1)
            break
        depth -= 1
        cut = _split(values, order, first, last)
        if cut <= num - 1:
            first = cut
        else:
            last = cut
    else:
        _insert(values, order, first, last)
    if is_sorted:
        _insert(values, order, 0, num - 1)


@compiled
def group(chosen, num_chosen, ends, tokens, slots):  # type: ignore[no-untyped-def]
    """Sort choices by expert, and return the number of experts that were chosen.

    Args:
        chosen: the experts of each token, token after token, as float32.
        num_chosen: number of experts of a token.
        ends: [num_experts + 1], gets the index of each expert's first choice, and the last end.
        tokens: gets the token of each choice, expert after expert.
        slots: gets the index in `tokens` of each choice.
    """
    for expert in range(len(ends)):
        ends[expert] = 0
    for expert in chosen:
        ends[int(expert)] += 1
    total = 0
    for expert in range(len(ends)):
        total += ends[expert]
        ends[expert] = total
    for entry in range(len(chosen) - 1, -1, -1):
        expert = int(chosen[entry])
        ends[expert] -= 1
        tokens[ends[expert]], slots[entry] = entry // num_chosen, ends[expert]
    num_hit = 0
    for expert in range(len(ends) - 1):
        num_hit += 1 if ends[expert] < ends[expert + 1] else 0
    return num_hit
