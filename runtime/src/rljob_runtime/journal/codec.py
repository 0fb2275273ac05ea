"""A group as a record of the journal, and back: every array as it is, the rest as JSON.

What verifiers needed besides the answer (``Prompt.metadata``) is left out: the group is scored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np

from rljob_runtime.journal.frames import Array, Arrays, DamagedError, Frame, encode
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.records import EpisodeRecord, Judgement, Prompt, RewardResult, Segment, Trajectory, Turn, VersionSpan
from rljob_runtime.sampling_mask import SamplingMask

ROUTE_TYPES: Mapping[str, type[np.signedinteger]] = {"int8": np.int8, "int16": np.int16}
REWARD_FIELDS = tuple(f.name for f in fields(RewardResult))


def encode_group(group: Group) -> list[bytes]:
    """The pieces of a group's record."""
    prompt = group.trajectories[0].prompt
    arrays: list[Array] = [prompt.token_ids]
    content = {
        "kind": "group",
        "group": group.group_id,
        "failed": group.failed_samples,
        "prompt": {
            "index": prompt.index,
            "text": prompt.text,
            "tokens": prompt.token_ids.size,
            "answer": prompt.answer,
            "source": prompt.source,
            "own_tag": prompt.own_tag,
        },
        "samples": [_sample(trajectory, prompt, arrays) for trajectory in group.trajectories],
    }
    return encode(content, arrays)


def size_bytes(group: Group) -> int:
    """Of a group's arrays: 8 for a sampled token, and those of its sampling mask and of its routes."""
    segments = [segment for trajectory in group.trajectories for segment in trajectory.segments]
    masks = sum(segment.sampling_mask.size_bytes for segment in segments if segment.sampling_mask is not None)
    routes = sum(segment.routes.nbytes for segment in segments if segment.routes is not None)
    return masks + routes + sum(segment.token_ids.nbytes + segment.logprobs.nbytes for segment in segments)


def decode_group(frame: Frame) -> Group:
    """The group of a record; its arrays are views of the record's bytes.

    Raises:
        DamagedError: the record contradicts itself.
    """
    content, arrays = frame.content, Arrays(frame.payload)
    try:
        raw = dict(content["prompt"])
        prompt = Prompt(token_ids=arrays.take(np.int32, raw.pop("tokens")), **raw)
        group = Group(
            group_id=content["group"],
            trajectories=tuple(_trajectory(content["group"], prompt, sample, arrays) for sample in content["samples"]),
            failed_samples=content["failed"],
            recovered=True,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"the record of a group cannot be used: {error}") from error
    arrays.done()
    return group


def _sample(trajectory: Trajectory, prompt: Prompt, arrays: list[Array]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if not np.array_equal(trajectory.prompt.token_ids, prompt.token_ids):  # an environment may begin in its own way each time
        arrays.append(trajectory.prompt.token_ids)
        content["prompt_tokens"] = trajectory.prompt.token_ids.size
    if trajectory.episode is not None:
        content["episode"] = asdict(trajectory.episode) | {"summary": dict(trajectory.episode.summary)}
    return content | {
        "index": trajectory.sample_index,
        "finish": trajectory.finish_reason,
        "generation_s": trajectory.generation_s,
        "reward": _reward(trajectory.reward),
        "segments": [_segment(segment, arrays) for segment in trajectory.segments],
    }


def _reward(reward: RewardResult) -> dict[str, Any]:
    content = {name: getattr(reward, name) for name in REWARD_FIELDS}
    return content | {"parts": dict(reward.parts), "judgements": [asdict(judgement) for judgement in reward.judgements]}


def _segment(segment: Segment, arrays: list[Array]) -> dict[str, Any]:
    arrays += [segment.token_ids, segment.logprobs]
    content = {
        "tokens": segment.token_ids.size,
        "sampled": segment.sampled,
        "is_prompt": segment.is_prompt,
        "number": segment.number,
        "logprobs": segment.logprobs.size,
        "spans": [(span.start, span.end, span.version) for span in segment.version_spans],
        "reward": segment.reward,
    }
    if segment.sampling_mask is not None:
        arrays += [segment.sampling_mask.token_ids, segment.sampling_mask.counts]
        content["mask"] = (segment.sampling_mask.token_ids.size, segment.sampling_mask.counts.size)
    if segment.routes is not None:
        arrays.append(segment.routes)
        content["routes"] = (segment.routes.dtype.name, *segment.routes.shape)
    return content


def _trajectory(group_id: int, prompt: Prompt, raw: Mapping[str, Any], arrays: Arrays) -> Trajectory:
    reward = dict(raw["reward"])
    judgements = tuple(Judgement(**judgement) for judgement in reward.pop("judgements"))
    if "prompt_tokens" in raw:
        prompt = replace(prompt, token_ids=arrays.take(np.int32, raw["prompt_tokens"]))
    episode = None
    if "episode" in raw:
        kept = dict(raw["episode"])
        episode = EpisodeRecord(turns=tuple(Turn(**turn) for turn in kept.pop("turns")), **kept)
    return Trajectory(
        group_id=group_id,
        sample_index=raw["index"],
        prompt=prompt,
        segments=tuple(_decoded_segment(segment, arrays) for segment in raw["segments"]),
        finish_reason=raw["finish"],
        generation_s=raw["generation_s"],
        reward=RewardResult(errors=tuple(reward.pop("errors")), timeouts=tuple(reward.pop("timeouts")), judgements=judgements, **reward),
        episode=episode,
    )


def _decoded_segment(raw: Mapping[str, Any], arrays: Arrays) -> Segment:
    token_ids, logprobs = arrays.take(np.int32, raw["tokens"]), arrays.take(np.float32, raw["logprobs"])
    mask = None
    if "mask" in raw:
        possible, positions = raw["mask"]
        mask = SamplingMask(token_ids=arrays.take(np.int32, possible), counts=arrays.take(np.int32, positions))
    routes = None
    if "routes" in raw:
        dtype, *shape = raw["routes"]
        routes = arrays.take(ROUTE_TYPES[dtype], math.prod(shape)).reshape(shape)
    return Segment(
        token_ids=token_ids,
        sampled=raw["sampled"],
        is_prompt=raw["is_prompt"],
        number=raw["number"],
        logprobs=logprobs,
        version_spans=tuple(VersionSpan(start=start, end=end, version=version) for start, end, version in raw["spans"]),
        reward=raw["reward"],
        sampling_mask=mask,
        routes=routes,
    )
