"""ROLL configurations: credit in agentic jobs, from the scores of episodes and turns to advantages.

What ROLL computes: ``roll/pipeline/agentic/utils.py`` of ROLL (https://github.com/alibaba/ROLL, main of August 2026). Scores are normalized
by ``reward_normalization``, whatever the estimator; a group of one, or of equal scores, gets 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_convert.common import Section, compact
from rljob_convert.roll.learning import Batch
from rljob_convert.source import Source

_NORM = "reward_normalization"
_METHODS = {"identity": "", "mean": "mean", "mean_std": "mean std", "asym_clip": "mean std"}
_TYPES = {"batch": "Batch", "group": "Group"}
_TURNS = {"gigpo": "GiGPO", "step_reinforce": "StepReinforce"}
_STEP_GAMMA = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """How episodes become advantages."""

    estimator: str
    advantage: Section
    """Fields of the estimator besides its name."""
    reward: Section
    """Normalization of scores."""


def credit(source: Source, numbers: Batch) -> Credit:
    """The estimator and the normalization of an agentic job."""
    for key in ("norm_mean_type", "norm_std_type"):
        if source.has(key):
            source.drop((key,), "ROLL normalizes agentic jobs by reward_normalization alone")
    written = str(source.peek("adv_estimator")).lower()
    if source.has("adv_estimator"):
        source.text("adv_estimator")
    by_turn = _TURNS.get(written)
    center, scale = _scopes(source, numbers, by_turn)
    reward = compact({"center": center, "scale": scale})
    if by_turn == "GiGPO":
        return _gigpo(source, center, scale)
    if by_turn is not None:
        return Credit(estimator=by_turn, advantage=compact({"gamma": _step_gamma(source)}), reward=reward)
    if written == "agentic_reinforce":
        source.differs(("adv_estimator",), "becomes Reinforce: one return per episode, not one per turn")
    elif written not in ("grpo", "reinforce"):
        source.differs(("adv_estimator",), "is none that agentic jobs have here, Reinforce is used", "choose algorithm.advantage.estimator")
    if center == "Group" and scale in (None, "Group"):
        normalized = {} if scale else {"normalizeStd": False}
        return Credit(estimator="GRPO", advantage=normalized, reward={})
    if written == "grpo":
        source.differs(
            ("adv_estimator",), f"becomes Reinforce: reward_normalization has {_shown(center)} mean and {_shown(scale)} deviation"
        )
    return Credit(estimator="Reinforce", advantage={}, reward=reward)


def _shown(scope: str | None) -> str:
    return "no" if scope is None else f"the {scope.lower()}'s"


def _scopes(source: Source, numbers: Batch, by_turn: str | None) -> tuple[str | None, str | None]:
    """Of mean and deviation: ROLL's explicit types, else what the method comes to with its grouping."""
    grouping = source.text(_NORM, "grouping") or "batch"
    method = source.choice(_METHODS, _NORM, "method") or ""
    default = "Batch" if grouping.lower() == "batch" else "Group"
    found = []
    for key, word in (("norm_mean_type", "mean"), ("norm_std_type", "std")):
        given = source.choice(_TYPES, _NORM, key)
        found.append(given or (default if word in method.split() else None))
    if found == [None, None] and source.has(_NORM, "grouping"):
        source.drop((_NORM, "grouping"), "nothing is normalized")
    if "Group" not in found or grouping == "traj_group_id":
        return _of_several(source, numbers, by_turn, found)
    kinds = source.length("train_env_manager", "tags")
    if grouping != "tags" or kinds > 1:
        what = "all episodes of a step" if grouping == "tags" else "the step"
        source.differs((_NORM, "grouping"), f"scores are normalized over {what}: RLJob has no statistics by {grouping}")
    return tuple("Batch" if scope == "Group" else scope for scope in found)  # type: ignore[return-value]


def _of_several(source: Source, numbers: Batch, by_turn: str | None, found: list[str | None]) -> tuple[str | None, str | None]:
    """A group of one episode has no statistics, unless its turns count."""
    if "Group" in found and numbers.samples < 2 and by_turn != "StepReinforce":
        why = "is left out: group_size is 1, and the normalized score of a single episode is 0, so that ROLL learns nothing"
        source.differs((_NORM, "grouping"), why, "choose algorithm.reward")
        found = [None if scope == "Group" else scope for scope in found]
    return found[0], found[1]


def _gigpo(source: Source, center: str | None, scale: str | None) -> Credit:
    if center != "Group" or scale == "Batch":
        why = f"has {_shown(center)} mean and {_shown(scale)} deviation; GiGPO of RLJob compares the episodes of a group"
        source.differs((_NORM, "grouping"), why, "check algorithm.advantage")
    if source.has(_NORM) and not source.has(_NORM, "method"):
        why = "without it ROLL leaves the returns of turns as they are; RLJob normalizes them over equal states, as the paper does"
        source.assume((_NORM, "method"), "mean_std" if scale else "mean", why)
    fields = compact(
        {
            "normalizeStd": None if scale else False,
            "gamma": _step_gamma(source),
            "episodeWeight": source.number("episode_reward_weight"),
            "turnWeight": source.number("step_reward_weight"),
            "episodeCount": "PerTurn",
        }
    )
    return Credit(estimator="GiGPO", advantage=fields, reward={})


def _step_gamma(source: Source) -> float:
    gamma = source.number("step_reward_gamma", high=1.0)
    return source.assume(("step_reward_gamma",), _STEP_GAMMA, "ROLL's default") if gamma is None else gamma
