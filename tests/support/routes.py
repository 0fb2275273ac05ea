"""Routes that say which token, at which place of its sequence, they are of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rljob_runtime.records import IntArray, Segment, Trajectory
from rljob_runtime.routes import RouteArray

LAYERS, CHOSEN, EXPERTS = 3, 2, 7


def routes_of(token_ids: IntArray, places: IntArray, layers: int = LAYERS, chosen: int = CHOSEN, experts: int = EXPERTS) -> RouteArray:
    """Shape (n, layers, chosen): a function of token, place and layer; experts of one layer differ."""
    first = (token_ids[:, None] * 5 + places[:, None] * 3 + np.arange(layers)) % experts
    return ((first[..., None] + np.arange(chosen)) % experts).astype(np.int8)


def routed(segment: Segment, before: IntArray, known: int = 0) -> Segment:
    """With the routes of all tokens from place ``known`` on, but of its last; ``before`` are the tokens of the sequence before it."""
    whole = np.concatenate([before, segment.token_ids])
    places = np.arange(known, whole.size - 1, dtype=np.int32)
    return replace(segment, routes=routes_of(whole[places], places))


def routed_trajectory(trajectory: Trajectory) -> Trajectory:
    """With routes in all sampled segments, each from where the one before ended."""
    before, known = trajectory.prompt.token_ids, 0
    segments = []
    for segment in trajectory.segments:
        if segment.is_prompt:
            before, known = segment.token_ids, 0
            segments.append(segment)
            continue
        segments.append(routed(segment, before, known) if segment.sampled else segment)
        before = np.concatenate([before, segment.token_ids])
        known = before.size - 1 if segment.sampled else known
    return replace(trajectory, segments=tuple(segments))
