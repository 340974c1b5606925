"""`mend_sampler`: around a fault of vLLM's on CPUs, with which no drawn answers can be compared.

Next file: `worker.py`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: What a report says of it.
FAULT = "vllm-project/vllm#55005"


def mend_sampler(sampler: Any) -> bool:
    """Let vLLM's rejection sampler read temperatures, if it does not; return whether it was mended.

    In vLLM 0.32 without Triton, what gives every draft token its request's temperature fills a copy
    that nobody reads (vllm-project/vllm#55005). Logits are then divided by whatever was in memory,
    so that draft tokens are drawn with other probabilities than they have, whoever drafted them.
    """
    import torch

    lengths = torch.tensor([2, 3], dtype=torch.int32)
    for values in ([0.5, 2.0], [3.0, 0.25]):
        found = sampler.expand_batch_to_tokens(torch.tensor(values), lengths, 3, 0, 1)
        if found.tolist() != [values[0], *values]:
            sampler.expand_batch_to_tokens = expand_batch_to_tokens
            return True
    return False


def expand_batch_to_tokens(
    x: "torch.Tensor",
    cu_num_tokens: "torch.Tensor",
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> "torch.Tensor":
    """Return each request's value once for each of its tokens, in vLLM's own words.

    Args:
        x: [num_requests].
        cu_num_tokens: [num_requests], where the tokens of each end.
        num_tokens: of all.
        replace_from, replace_to: one value stands for another.
    """
    sizes = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    expanded = x.repeat_interleave(sizes, output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)
