"""ROLL's on-policy distillation: students are actors, a teacher is a Teacher, rewards count or only measure."""

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


def test_of_several_teachers_the_first_one_is_taken() -> None:
    several = f"{{one: {TEACHER[:-1]}, tag_included: [math]}}, two: {TEACHER}}}"
    spec, notes = converted(PURE, several)
    assert [c["model"]["path"] for c in spec["components"] if c["role"] == "Teacher"] == ["a/large"]
    assert "one is taken for all prompts" in notes["teacher.two"]
    assert "scores all prompts" in notes["teacher.one.tag_included"]


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
