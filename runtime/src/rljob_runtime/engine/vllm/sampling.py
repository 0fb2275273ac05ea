"""Sampling settings in vLLM's form, and the sampling mask from what it returns.

vLLM 0.32's own ``return_sampling_mask`` needs model runner V2, which CPU does not have. The same ids come, on both runners, with the
log-probs of the most likely tokens: ``processed_logprobs`` are ``-inf`` for what cannot be sampled.
"""

from __future__ import annotations

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.outputs import LogprobsLists

from rljob_api.v1alpha1.learning import MAX_TOP_K
from rljob_runtime.records import IntArray, Sampling

TIES = 64
"""Logits in bfloat16 are often equal, and vLLM keeps all that equal the k-th: so many more are listed, and an eighth of k."""
MAX_LISTED = MAX_TOP_K + TIES + MAX_TOP_K // 8
NO_IDS: IntArray = np.zeros(0, dtype=np.int32)


def possible_tokens(logprobs: LogprobsLists, vocab_size: int) -> list[IntArray]:
    """Ids that could have been sampled, for each of some tokens of a response, the sampled one first; none where not all are known.

    vLLM lists the sampled token and then the most likely ones with their processed log-probs; what cannot be sampled has ``-inf``. Where
    even the last of them could be sampled, because many logits are equal at the edge of top-k, others may not be listed.
    """
    found = []
    for ids, values in zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True):
        listed = np.isfinite(values[1:])
        whole = ids.size - 1 >= vocab_size or not listed[-1]
        others = ids[1:][listed & (ids[1:] != ids[0])]
        found.append(np.concatenate([ids[:1], others]).astype(np.int32) if whole else NO_IDS)
    return found


def listed_tokens(sampling: Sampling, vocab_size: int) -> int:
    """How many of the most likely tokens vLLM is asked for: the sampling mask, and some more because equal logits pass top-k together."""
    return min(vocab_size, sampling.top_k + TIES + sampling.top_k // 8) if sampling.returns_mask else 0


def sampling_params(sampling: Sampling, extra_eos: int | None, vocab_size: int) -> SamplingParams:
    """The vLLM form of a sampling setting, without a seed."""
    stops = sampling.stop_token_ids if extra_eos is None else (*sampling.stop_token_ids, extra_eos)
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=sorted(set(stops)),
        logprobs=listed_tokens(sampling, vocab_size),  # besides the sampled token's
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        seed=0,
    )
