"""ROLL configurations: the rewards of an RLVR job, one for each domain, chosen by the tag of a prompt.

What the workers compute: ``roll/pipeline/rlvr/rewards`` of ROLL (https://github.com/alibaba/ROLL, main of August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api import paths
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.roll.judges import is_judge, is_reward_model, judge_reward, model_reward
from rljob_convert.roll.placement import reward_places
from rljob_convert.source import Source

TAG_FIELD = "tag"
"""Field of ROLL's data files that holds the tag of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """What a rule worker becomes."""

    type: str
    differs: str = ""
    """What it computes otherwise."""


_WORKERS: Mapping[str, _Rule] = {
    "MathRuleRewardWorker": _Rule(type="MathRule", differs="without ROLL's further rewards for format and length"),
    "CodeSandboxRewardWorker": _Rule(type="Code", differs="the tests run in a sandbox of the node, not on a server"),
    "GeneralRuleRewardWorker": _Rule(type="IFEval", differs="a wrong answer scores 0"),
    "CrossThinkQARuleRewardWorker": _Rule(type="MultipleChoice", differs="a wrong answer scores 0, in ROLL down to -1"),
    "MultipleChoiceBoxedRuleRewardWorker": _Rule(type="MultipleChoice", differs="a wrong answer scores 0"),
}
"""By the name of the class. GeneralRuleRewardWorker is what ifeval_rule_reward_worker.py calls its own."""
_DOMAINS: Mapping[str, str] = {
    "math_rule": "MathRuleRewardWorker",
    "code_sandbox": "CodeSandboxRewardWorker",
    "ifeval": "GeneralRuleRewardWorker",
    "crossthinkqa": "CrossThinkQARuleRewardWorker",
    "multiple_choice_boxed": "MultipleChoiceBoxedRuleRewardWorker",
}
"""Workers of the domains that an excerpt names without a worker_cls."""


def chooses_by_tag(source: Source) -> bool:
    """Whether a job has several rewards, of which the tag of a prompt chooses one."""
    return len(reward_places(source)) > 1


def domains(source: Source) -> list[list[str]]:
    """The tags of each reward, which ROLL calls a domain."""
    found = []
    for where in reward_places(source):
        at = (*where, "tag_included")
        found.append([str(source.peek(*at, index)) for index in range(min(source.length(*at), common.MAX_TAGS))])
    return found


def rewards(source: Source, num_workers: int, judges: Mapping[tuple[str, ...], str]) -> list[Section]:
    """The rewards; one that no verifier of RLJob's computes is a Function to write.

    ``num_workers`` processes compute them, ``judges`` are components that serve the models of some, by their place.
    """
    result: list[Section] = []
    by_tag = chooses_by_tag(source)
    for where in reward_places(source):
        domain = str(where[-1])
        name = common.label(domain, "reward", (reward["name"] for reward in result))
        reward = _reward(source, where, domain, name, num_workers, judges.get(where))
        tags = _tags(source, where, by_tag=by_tag)
        result.append(compact({"name": name, "type": reward["type"], "sources": tags, **reward}))
    if not result:
        source.assume(("rewards",), "math_rule", "the manifest needs a reward", "choose rewards[].type")
        result.append({"name": "math-rule", "type": "MathRule"})
    return result


def _reward(source: Source, where: paths.Parts, domain: str, name: str, num_workers: int, judge: str | None) -> Section:
    worker = source.text(*where, "worker_cls", limit=512)
    at = where if worker is None else (*where, "worker_cls")
    kind = _DOMAINS.get(domain, "") if worker is None else worker.rsplit(".", 1)[-1]
    if is_judge(kind, domain):
        return judge_reward(source, where, num_workers, judge)
    if is_reward_model(kind):
        return model_reward(source, where, num_workers, judge)
    rule = _WORKERS.get(kind)
    if rule is not None:
        source.differs(at, f"{kind} becomes {rule.type}: {rule.differs}", "check the scores of rljob.rewards")
        return {"type": rule.type}
    word = re.sub(r"[^a-z0-9]+", "_", name).strip("_")
    function = f"my_rewards:{word if word[:1].isalpha() else f'reward_{word}'}"
    why = f"RLJob has no reward like {kind or domain} of its own"
    source.assume(at, function, why, "write this function, see the field rewards[].function, or remove the reward and its prompts")
    return {"type": "Function", "function": function}


def _tags(source: Source, where: paths.Parts, *, by_tag: bool) -> list[str]:
    """Tags of the prompts that the reward scores; empty where it scores all."""
    at = (*where, "tag_included")
    if not source.has(*at):
        return []
    if not by_tag:
        source.drop(at, "the job has one reward, which scores every prompt; ROLL gives prompts with unknown tags to math_rule")
        return []
    return source.texts(*at, most=common.MAX_TAGS)
