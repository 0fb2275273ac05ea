"""Short ways to make records in tests."""

from collections.abc import Sequence

import numpy as np

from rljob_runtime.engine.protocol import Engine
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.packed import unpack
from rljob_runtime.records import Completion, IntArray, Prompt, RewardResult, Segment, Trajectory, VersionSpan


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, dtype=np.int32)


def make_prompt(index: int, tokens: tuple[int, ...] = (1, 2, 3), source: str = "sums") -> Prompt:
    return Prompt(index=index, text=f"prompt {index}", token_ids=ids(*tokens), answer=str(index), source=source)


def make_segment(
    tokens: Sequence[int], version: int = 0, logprobs: Sequence[float] | None = None, versions: Sequence[int] | None = None
) -> Segment:
    """A sampled one, of one version or with the version of each token."""
    spans = [(0, len(tokens), version)] if tokens and versions is None else []
    for index, one in enumerate(versions or ()):  # neighbors of one version are one span, as engines give them
        start = spans.pop()[0] if spans and spans[-1][2] == one else index
        spans.append((start, index + 1, one))
    if logprobs is None:
        logprobs = [-0.5 - 0.1 * i for i in range(len(tokens))]
    return Segment(
        token_ids=ids(*tokens),
        sampled=True,
        logprobs=np.array(logprobs, dtype=np.float32),
        version_spans=tuple(VersionSpan(start=s, end=e, version=v) for s, e, v in spans),
    )


def make_completion(request_id: str, tokens: Sequence[int] = (7, 8), version: int = 0, finish: str = "stop") -> Completion:
    return Completion(request_id=request_id, segment=make_segment(tokens, version), finish_reason=finish)


def tokens(completion: Completion) -> tuple[int, ...]:
    """Its token ids."""
    return tuple(completion.segment.token_ids.tolist())


def collected(engine: Engine, max_wait_s: float) -> list[Completion]:
    """What an engine returns, unpacked."""
    return unpack(engine.collect(max_wait_s))


def make_trajectory(
    group: int,
    sample: int,
    score: float = 1.0,
    tokens: tuple[int, ...] = (7, 8),
    version: int = 0,
    prompt_tokens: tuple[int, ...] = (1, 2, 3),
) -> Trajectory:
    result = RewardResult(sample_id=f"{group}/{sample}", score=score, parts={"task": score}, passed=score >= 1.0)
    return Trajectory(
        group_id=group,
        sample_index=sample,
        prompt=make_prompt(group, prompt_tokens),
        segments=(make_segment(tokens, version),),
        finish_reason="stop",
        reward=result,
    )


def make_group(group: int, scores: tuple[float, ...] = (0.0, 1.0), version: int = 0, failed: int = 0) -> Group:
    return Group(
        group_id=group,
        trajectories=tuple(make_trajectory(group, i, score, version=version) for i, score in enumerate(scores)),
        failed_samples=failed,
    )
