"""ROLL's on-policy distillation: students are actors, teachers are Teachers of some prompts each, rewards count or only measure."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_convert import convert
from rljob_convert.conversion import problems

SIZES = (
    "exp_name: a\nnum_gpus_per_node: 2\nrollout_batch_size: 8\nnum_return_sequences_in_group: 4\nprompt_length: 64\nresponse_length: 64\n"
)
PURE = """
pretrain: a/small
student_train: {{device_mapping: '[0]', training_args: {{learning_rate: 1.0e-6}}, model_args: {{dtype: bf16}}}}
student_infer: {{device_mapping: '[1]', strategy_args: {{strategy_name: vllm}}}}
teacher: {teacher}
rewards: {{math_rule: {{worker_cls: x.MathRuleRewardWorker, world_size: 2}}}}
"""
MIXED = PURE.replace("student_train", "actor_train").replace("student_infer", "actor_infer") + "use_opd: true\nadv_estimator: reinforce\n"
TEACHER = "{model_args: {model_name_or_path: a/large}, device_mapping: '[0]', opd_kl_coef: 0.5}"


def converted(text: str, teacher: str = TEACHER) -> tuple[dict[str, Any], dict[str, str]]:
    """The spec, and what the notes say by path."""
    result = convert("roll", SIZES + text.format(teacher=teacher))
    assert problems(result) == ()
    return dict(result.manifest["spec"]), {note.path: note.why for note in result.notes}


def test_students_with_a_teacher_become_a_job_that_follows_it_alone() -> None:
    spec, notes = converted(PURE)
    places = {c["name"]: (c["role"], c["placement"].get("deviceMapping"), c.get("model")) for c in spec["components"]}
    assert places["actor_train"] == ("Trainer", "[0]", None)
    assert places["actor_infer"] == ("Rollout", "[1]", None)
    assert places["teacher"] == ("Teacher", "[0]", {"path": "a/large"})
    assert spec["algorithm"]["distillation"] == {"coefficient": 0.5, "placement": "Reward"}
    assert "advantage" not in spec["algorithm"]
    assert [reward["weight"] for reward in spec["rewards"]] == [0.0]
    assert "only measure" in notes["rewards"]
    assert spec["training"]["learningRate"] == 1e-6


def test_a_teachers_layers_are_divided_as_in_the_file() -> None:
    divided = ", strategy_args: {strategy_config: {tensor_model_parallel_size: 2}}}"
    spec, _ = converted(PURE, TEACHER.replace("'[0]'", "'[0, 1]'")[:-1] + divided)
    assert [c.get("tensorParallelSize") for c in spec["components"] if c["role"] in ("Trainer", "Teacher")] == [None, 2]
    spec, notes = converted(PURE, TEACHER[:-1] + divided)
    assert "does not divide its 1 processes" in notes["teacher.strategy_args.strategy_config.tensor_model_parallel_size"]
    assert all("tensorParallelSize" not in component for component in spec["components"])


def test_beside_rewards_both_count() -> None:
    spec, _ = converted(MIXED)
    assert spec["algorithm"]["distillation"] == {"coefficient": 0.5, "placement": "Reward"}
    assert spec["algorithm"]["advantage"]["estimator"] == "Reinforce"
    assert "weight" not in spec["rewards"][0]


def teaching(spec: dict[str, Any]) -> dict[str, Any]:
    """What each Teacher of a spec teaches, by its name."""
    return {c["name"]: c.get("teaches") for c in spec["components"] if c["role"] == "Teacher"}


def named(*tags: str, coefficient: float = 0.5) -> str:
    """A teacher of these tags."""
    teacher = TEACHER.replace("0.5", str(coefficient))
    return f"{teacher[:-1]}, tag_included: [{', '.join(tags)}]}}" if tags else teacher


DOMAINS = PURE.replace(
    "rewards: {{math_rule: {{worker_cls: x.MathRuleRewardWorker, world_size: 2}}}}",
    """rewards:
  math_rule: {{worker_cls: x.MathRuleRewardWorker, tag_included: [math, aime], world_size: 1}}
  code: {{worker_cls: x.CodeSandboxRewardWorker, tag_included: [code], world_size: 1}}""",
)


def test_each_teacher_has_the_prompts_of_its_domains() -> None:
    """A domain is what one reward scores: ROLL sends all of it to a teacher that names one of its tags."""
    spec, notes = converted(DOMAINS, f"{{one: {named('math')}, two: {named('code')}}}")
    assert teaching(spec) == {"teacher_one": {"sources": ["math", "aime"]}, "teacher_two": {"sources": ["code"]}}
    assert spec["algorithm"]["distillation"] == {"coefficient": 0.5, "placement": "Reward"}
    assert "with aime as well" in notes["teacher.one.tag_included"]
    assert "teacher.two.tag_included" not in notes
    assert spec["data"]["train"][0]["jsonl"]["tagField"] == "tag"


def test_teachers_of_different_coefficients_have_weights() -> None:
    spec, _ = converted(DOMAINS, f"{{one: {named('math', 'aime', coefficient=0.3)}, teacher_2: {named('code', coefficient=1.0)}}}")
    assert teaching(spec) == {"teacher_one": {"sources": ["math", "aime"], "weight": 0.3}, "teacher_2": {"sources": ["code"]}}
    assert spec["algorithm"]["distillation"]["coefficient"] == 1.0


def test_a_teacher_without_tags_has_all_other_prompts() -> None:
    spec, notes = converted(DOMAINS, f"{{one: {named()}, two: {named('code')}}}")
    assert teaching(spec) == {"teacher_one": None, "teacher_two": {"sources": ["code"]}}
    assert "does not score code, which teacher.two has: ROLL adds up" in notes["teacher.one"]


def test_of_several_teachers_of_the_same_prompts_the_first_one_is_taken() -> None:
    spec, notes = converted(DOMAINS, f"{{one: {named()}, two: {named()}}}")
    assert teaching(spec) == {"teacher_one": None}
    assert "names no tags, as teacher.one: ROLL adds up the log-ratios" in notes["teacher.two"]
    spec, notes = converted(DOMAINS, f"{{one: {named('math')}, two: {named('aime')}, three: {named('code')}}}")
    assert teaching(spec) == {"teacher_one": {"sources": ["math", "aime"]}, "teacher_three": {"sources": ["code"]}}
    assert "teacher.one has math, aime" in notes["teacher.two.tag_included"]
    assert "other teachers come first" in notes["teacher.two"]


def test_prompts_without_a_teacher_are_noted() -> None:
    spec, notes = converted(DOMAINS, named("code", "poems"))
    assert teaching(spec) == {"teacher": {"sources": ["code", "poems"]}}
    assert "no teacher names math, aime: ROLL trains such prompts without one" in notes["teacher"]


def test_tags_of_teachers_alone_have_the_data_tagged() -> None:
    """With one reward, which scores all prompts."""
    spec, _ = converted(PURE, f"{{one: {named('math')}, two: {named('code')}}}")
    assert teaching(spec) == {"teacher_one": {"sources": ["math"]}, "teacher_two": {"sources": ["code"]}}
    assert spec["data"]["train"][0]["jsonl"]["tagField"] == "tag"


def test_tags_of_an_agentic_file_are_environments() -> None:
    text = """
pretrain: a/small
sequence_length: 256
actor_train: {{device_mapping: '[0]', training_args: {{learning_rate: 1.0e-6}}}}
actor_infer: {{device_mapping: '[1]', strategy_args: {{strategy_name: vllm}}}}
teacher: {teacher}
use_opd: true
adv_estimator: reinforce
train_env_manager: {{tags: [Frozen_Lake, Other], num_env_groups: 2, group_size: 4}}
custom_envs: {{Frozen_Lake: {{env_type: frozen_lake}}, Other: {{env_type: sokoban}}}}
"""
    spec, _ = converted(text.replace("prompt_length", ""), f"{{one: {named('Frozen_Lake')}, two: {named('Other')}}}")
    names = [environment["name"] for environment in spec["environments"]]
    assert names == ["frozen-lake", "other"]
    assert teaching(spec) == {"teacher_one": {"sources": names[:1]}, "teacher_two": {"sources": names[1:]}}


@pytest.mark.parametrize("key", ["use_opd: true\n"])
def test_a_teacher_that_nothing_asks_for_is_left_out(key: str) -> None:
    spec, notes = converted(MIXED.replace(key, ""))
    assert all(c["role"] != "Teacher" for c in spec["components"])
    assert "ROLL starts no teacher" in notes["teacher"]


def test_settings_of_scores_are_noted_in_distillation_alone() -> None:
    text = PURE + "adv_estimator: grpo\ndifficulty_mask: true\nwhiten_advantages: true\nkl_penalty: mse\n"
    spec, notes = converted(text)
    assert spec["algorithm"]["advantage"] == {"whiten": True}
    assert "nothing to estimate" in notes["adv_estimator"]
    assert "count for nothing" in notes["difficulty_mask"]
    assert "log-ratio" in notes["kl_penalty"]
