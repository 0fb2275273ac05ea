"""Agentic files of ROLL: environments by tag from other files, turns that are prompts of their own, tools, validation, dead keys."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.validation import check
from rljob_convert import conversion
from rljob_convert.notes import NoteKind
from tests.unit.convert import cases


def spec_of(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = cases.converted(cases.FOLDER / f"{name}.yaml").manifest["spec"]
    return spec


@pytest.mark.parametrize("ratio", [0, 1])
def test_the_documented_example_validates_unedited(ratio: int) -> None:
    """Asynchronous as ROLL's guide prints it, and synchronous, as the example it is made from."""
    text = (cases.FOLDER / "roll-agentic-async.yaml").read_text().replace("async_generation_ratio: 1", f"async_generation_ratio: {ratio}")
    converted = conversion.convert("roll", text)
    checked = check(converted.manifest)
    assert checked is not None
    assert converted.manifest["spec"].get("overlap", {}).get("asyncGenerationRatio", 0) == ratio


def test_a_turn_keeps_its_bound_where_the_file_has_no_sequence_length() -> None:
    """ROLL makes a sequence of ``prompt_length`` and ``response_length``, and a turn of it has at most ``max_new_tokens``."""
    path = cases.FOLDER / "roll-agentic-async.yaml"
    text = path.read_text() + "\nmax_actions_per_traj: 10\n"
    (line,) = [line for line in text.splitlines() if line.startswith("sequence_length:")]
    total = int(line.split()[1])
    alone = text.replace(line, f"prompt_length: 1000\nresponse_length: {total - 1000}")
    rollouts = [conversion.convert("roll", each).manifest["spec"]["rollout"] for each in (text, alone)]
    assert rollouts[0] == rollouts[1]
    assert rollouts[0]["maxResponseTokens"] < total // 4


def test_references_into_another_file_bring_environments_that_this_file_has_overridden() -> None:
    trained, *validated = spec_of("roll-agentic-steps")["environments"]
    assert (trained["type"], trained.get("share", 1), trained["validationShare"], trained["maxTurns"]) == ("Sokoban", 1, 256, 10)
    assert trained["parameters"]["dim_room"] == [6, 6]
    assert [(each["type"], each["share"], each["validationShare"]) for each in validated] == [("Sokoban", 0, 256), ("FrozenLake", 0, 512)]
    assert spec_of("roll-agentic-steps")["rollout"]["maxResponseTokens"] == 64  # max_tokens_per_step of the file in front of 128 behind it


def test_a_step_manager_makes_each_turn_a_prompt_that_shows_what_was_before() -> None:
    prompt = spec_of("roll-agentic-steps")["environments"][0]["prompt"]
    assert (prompt["history"], prompt["memoryTurns"], prompt["memory"]) == ("Turn", 4, "InvalidTurns")
    assert "{history}" in prompt["turn"]


def test_a_format_penalty_counts_in_the_environment_and_is_dead_in_the_manager() -> None:
    path = cases.FOLDER / "roll-agentic-steps.yaml"
    assert [each.get("rewards") for each in spec_of("roll-agentic-steps")["environments"]] == [
        {"formatPenalty": -0.05},
        None,
        {"formatPenalty": -0.01},
    ]
    (note,) = [note for note in cases.converted(path).notes if note.path == "train_env_manager.format_penalty"]
    assert (note.kind, "ROLL itself ignores it" in note.why) == (NoteKind.DROPPED, True)


def test_tools_stop_strings_and_limits_of_turns() -> None:
    spec = spec_of("roll-agentic-tools")
    code, counting = spec["environments"]
    assert spec["rollout"]["stopStrings"] == ["</code>"]
    assert (code["type"], code["share"], code["maxTurns"]) == ("ToolUse", 96, 5)
    assert code["parameters"] == {
        "path": "data/dapo-17k.jsonl",
        "prompt_field": "problem",
        "answer_field": "answer",
        "tools": [{"type": "Python", "name": "code", "timeout_s": 5.0}],
        "call_format": "Tags",
        "max_calls": 5,
        "reward": {"type": "MathRule"},
    }
    assert (counting["type"], counting["share"], counting["maxTokensPerTurn"]) == ("ReasoningGym", 32, 256)
    assert counting["parameters"] == {"task": "letter_counting", "size": 500, "seed": 42}
    assert (spec["validation"]["maxPrompts"], spec["validation"]["samplesPerPrompt"]) == (64, 2)
    assert {key: spec["validation"][key] for key in ("temperature", "topP", "topK")} == {"temperature": 0.99, "topP": 0.99, "topK": 100}


def test_a_manager_that_concatenates_observations_shows_these_alone_and_the_suffix() -> None:
    text = """
    adv_estimator: step_reinforce
    env_manager_cls: roll.pipeline.agentic.env_manager.step_concat_env_manager.StepConcatEnvManager
    custom_envs:
      Game: {env_type: "game:GuessTheNumber-v0", max_steps: 4, history_length: 4, agent_template: "{history}\\n{current_observation}"}
    train_env_manager: {num_env_groups: 8, group_size: 1, tags: [Game], num_groups_partition: [8]}
    """
    (environment,) = conversion.convert("roll", text).manifest["spec"]["environments"]
    assert environment["prompt"] == {
        "turn": "{history}\n{current_observation}\n{suffix}",
        "history": "Turn",
        "memoryTurns": 3,
        "memory": "Observations",
    }


@pytest.mark.parametrize("name", ["roll-agentic-steps", "roll-agentic-tools"])
def test_estimators_of_turns_their_prompts_and_stop_strings_are_valid(name: str) -> None:
    assert not conversion.problems(cases.converted(cases.FOLDER / f"{name}.yaml"))


QUESTIONS = """
rollout_batch_size: 8
train_env_manager: {num_env_groups: 8, group_size: 1, tags: [asked]}
custom_envs:
  asked:
    env_type: KIND
    max_steps: 4
    env_config: {dataset_name: axon-rl/HotpotQA, split: train, question_key: problem, answer_key: answer, extract_boxed: BOXED}
    tool_wrapper: WRAPPER
"""


def asked(kind: str, wrapper: str, *, boxed: str = "false") -> tuple[dict[str, Any], list[str]]:
    """The environment that becomes of one tag, and the notes about it."""
    text = QUESTIONS.replace("KIND", kind).replace("WRAPPER", wrapper).replace("BOXED", boxed)
    converted = conversion.convert("roll", text)
    (environment,) = converted.manifest["spec"]["environments"]
    return environment, [f"{note.path}: {note.why}" for note in converted.notes]


def test_a_search_tool_becomes_a_corpus_of_ones_own() -> None:
    tool = "{tool_id: search, tool_args: {search_url: 'http://localhost:8000/retrieve', topk: 5}}"
    environment, notes = asked("roll_qa", f"{{wrapper_args: {{tool_success_reward: 0.2, max_tool_uses: 1}}, tool_configs: [{tool}]}}")
    parameters = environment["parameters"]
    assert (environment["type"], parameters["path"], parameters["prompt_field"]) == ("ToolUse", "data/hotpotqa.jsonl", "problem")
    assert parameters["tools"] == [{"type": "Search", "name": "search", "corpus": "data/corpus.jsonl", "top_k": 5}]
    assert parameters["reward"] == {"type": "ExactMatch", "extraction": "Tag", "parameters": {"ignore_case": True}}
    assert any("calls of tools have no reward" in note for note in notes)


@pytest.mark.parametrize(
    ("kind", "boxed", "reward"),
    [
        ("math:Math12K", "false", {"type": "MathRule"}),
        ("logic:RuleTaker-d0", "true", {"type": "ExactMatch", "extraction": "Boxed", "parameters": {"ignore_case": True}}),
    ],
)
def test_a_question_without_tools_is_a_chat_of_one_turn(kind: str, boxed: str, reward: dict[str, Any]) -> None:
    environment, _ = asked(kind, "null", boxed=boxed)
    assert (environment["type"], environment["parameters"]["reward"]) == ("Chat", reward)


def test_tools_that_rljob_lacks_leave_a_class_to_write() -> None:
    environment, _ = asked("roll_qa", "{wrapper_args: {}, tool_configs: [{tool_id: mcp, tool_args: {server_url: xxx}}]}")
    assert environment["type"] == "my_environments:RollQa"
    assert environment["parameters"]["tool_wrapper"]["tool_configs"][0]["tool_id"] == "mcp"
