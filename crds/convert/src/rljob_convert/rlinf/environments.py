"""RLinf configurations: environments of agentic jobs, which bring the prompts and the scores themselves."""

from __future__ import annotations

import json

from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.rlinf.placement import Placed
from rljob_convert.source import Source

_DATA = ("train_data_paths", "val_data_paths", "prompt_key", "answer_key")
_REWARD = ("reward_type", "reward_scale")


def with_environments(source: Source, components: list[Section]) -> list[Section]:
    """The components of an agentic job: one for environments, none for rewards."""
    kept = [component for component in components if component["role"] != "Reward"]
    for component in components:
        if component["role"] == "Reward":
            shown = {key: value for key, value in component.items() if key not in ("name", "role")}
            why = f"an agentic job is scored by its environments; as Reward it would have been {json.dumps(shown)}"
            source.assume(("reward",), f"no {component['name']}", why, "compute the score in the environment")
    if not any(component["role"] == "Environment" for component in kept):
        why = "RLinf runs the agents beside the engines; RLJob in CPU processes of their own"
        source.assume(("env",), 1, why, "set workers of the Environment component")
        kept.append({"name": "environment", "role": "Environment", "placement": {"workers": 1}})
    return kept


def environments(source: Source, placed: Placed, *, validates: bool) -> list[Section]:
    """One environment, which gets what the file says of data and scores as parameters: RLinf's files of language models name none."""
    kind = next((component["name"] for component in placed.components if component["role"] == "Environment"), "environment")
    path = common.environment_class(kind)
    remedy = "write this class, see environments[].type; data and reward of the file become its parameters"
    source.assume(("env",), path, "the file names no environment that RLJob has", remedy)
    counts = [source.integer("agentloop", key, low=1, high=10_000) for key in ("max_turns", "max_assistant_turns")]
    turns = next((count for count in counts if count is not None), None)
    if None not in counts and len(set(counts)) > 1:
        source.drop(("agentloop", "max_assistant_turns"), f"max_turns {turns} counts")
    parameters = {key: source.copy((section, key)) for section, keys in (("data", _DATA), ("reward", _REWARD)) for key in keys}
    if source.has("data", "apply_chat_template"):
        source.flag("data", "apply_chat_template")
        source.differs(("data", "apply_chat_template"), "conversations are made by the tokenizer's chat template")
    share = {"validationShare": 1.0} if validates else {}
    entry = {"name": common.label(kind, "environment"), "type": path, **share, "maxTurns": turns, "parameters": compact(parameters)}
    return [compact(entry)]
