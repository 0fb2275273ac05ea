"""Scoring responses in processes of their own, each evaluation under a time limit.

::

    RewardConfig -> RewardPool (parent) == socket ==> child: extract -> reward function -> score

The pool is ``rljob_runtime.rewards.pool.RewardPool``; it is not imported here so that a child starts without numpy.
"""

from rljob_api.vocabulary import Extraction, RewardType
from rljob_runtime.rewards.config import RewardConfig

__all__ = ["Extraction", "RewardConfig", "RewardType"]
