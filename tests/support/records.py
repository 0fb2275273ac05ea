"""Short ways to make records in tests."""

from rljob_runtime.overlap.buffer import Group
from rljob_runtime.records import Completion, Prompt, RewardResult, Trajectory, VersionSpan


def make_prompt(index: int, tokens: tuple[int, ...] = (1, 2, 3), source: str = "sums") -> Prompt:
    return Prompt(index=index, text=f"prompt {index}", token_ids=tokens, answer=str(index), source=source)


def make_completion(request_id: str, tokens: tuple[int, ...] = (7, 8), version: int = 0, finish: str = "stop") -> Completion:
    return Completion(
        request_id=request_id,
        token_ids=tokens,
        logprobs=tuple(-0.5 - 0.1 * i for i in range(len(tokens))),
        version_spans=(VersionSpan(start=0, end=len(tokens), version=version),),
        finish_reason=finish,
    )


def make_trajectory(
    group: int,
    sample: int,
    score: float = 1.0,
    tokens: tuple[int, ...] = (7, 8),
    version: int = 0,
    prompt_tokens: tuple[int, ...] = (1, 2, 3),
) -> Trajectory:
    completion = make_completion(f"{group}/{sample}", tokens, version)
    result = RewardResult(sample_id=completion.request_id, score=score, parts={"task": score}, passed=score >= 1.0)
    return Trajectory(
        group_id=group,
        sample_index=sample,
        prompt=make_prompt(group, prompt_tokens),
        response_text="78",
        completion=completion,
        reward=result,
    )


def make_group(group: int, scores: tuple[float, ...] = (0.0, 1.0), version: int = 0, failed: int = 0) -> Group:
    return Group(
        group_id=group,
        trajectories=tuple(make_trajectory(group, i, score, version=version) for i, score in enumerate(scores)),
        failed_samples=failed,
    )
