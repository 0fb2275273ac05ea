"""ROLL configurations: model and engine, rewards by the tag of a prompt, templates, schedules."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rljob_convert import convert
from rljob_convert.notes import Note, NoteKind
from tests.unit.convert import cases
from tests.unit.convert.cases import component

WORKERS = "roll.pipeline.rlvr.rewards"
DOMAINS = f"""
exp_name: domains
actor_train: {{data_args: {{file_name: [data/code.jsonl, data/math.jsonl]}}}}
rewards:
  math_rule: {{worker_cls: {WORKERS}.math_rule_reward_worker.MathRuleRewardWorker, tag_included: [deepmath_103k, aime], world_size: 8}}
  code_sandbox: {{worker_cls: {WORKERS}.code_sandbox_reward_worker.CodeSandboxRewardWorker, tag_included: [KodCode], world_size: 4}}
  ifeval: {{worker_cls: {WORKERS}.ifeval_rule_reward_worker.GeneralRuleRewardWorker, tag_included: [ifeval]}}
  crossthinkqa: {{worker_cls: {WORKERS}.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker, tag_included: [crossthinkqa]}}
  llm_judge: {{worker_cls: {WORKERS}.llm_judge_reward_worker.LLMJudgeRewardWorker, tag_included: [RLVR]}}
"""


def spec_of(text: str) -> dict[str, Any]:
    return cases.spec_of("roll", text)


def notes(text: str, path: str) -> list[Note]:
    return cases.notes("roll", text, path)


class TestRewards:
    def test_one_reward_for_each_domain_chosen_by_tag(self) -> None:
        rewards = spec_of(DOMAINS)["rewards"]
        assert [(reward["type"], reward["sources"]) for reward in rewards] == [
            ("MathRule", ["deepmath_103k", "aime"]),
            ("Code", ["KodCode"]),
            ("IFEval", ["ifeval"]),
            ("MultipleChoice", ["crossthinkqa"]),
            ("LLMJudge", ["RLVR"]),
        ]

    def test_the_files_say_which_field_holds_the_tag(self) -> None:
        assert {source["jsonl"]["tagField"] for source in spec_of(DOMAINS)["data"]["train"]} == {"tag"}

    def test_one_reward_scores_every_prompt(self) -> None:
        text = "exp_name: a\nrewards: {math_rule: {tag_included: [aime]}}"
        spec = spec_of(text)
        assert spec["rewards"] == [{"name": "math-rule", "type": "MathRule"}]
        assert "tagField" not in spec["data"]["train"][0]["jsonl"]
        assert notes(text, "rewards.math_rule.tag_included")[0].kind is NoteKind.DROPPED

    def test_an_unknown_section_is_no_reward(self) -> None:
        text = "exp_name: a\nmy_helper: {world_size: 8}"
        assert [reward["name"] for reward in spec_of(text)["rewards"]] == ["math-rule"]
        assert notes(text, "my_helper")[0].kind is NoteKind.UNKNOWN

    def test_a_worker_of_ones_own_is_to_be_written(self) -> None:
        (reward,) = spec_of("exp_name: a\nrewards: {style: {worker_cls: mine.StyleWorker}}")["rewards"]
        assert reward == {"name": "style", "type": "Function", "function": "my_rewards:style"}


def test_a_reward_model_reads_what_the_policy_was_given_and_said() -> None:
    model = "model_args: {model_name_or_path: some/reward}, device_mapping: 'list(range(4,8))'"
    text = f"exp_name: a\nrewards: {{helpful: {{worker_cls: roll.pipeline.base_worker.RewardWorker, {model}}}}}"
    (reward,) = spec_of(text)["rewards"]
    assert (reward["type"], reward["rewardModel"]["template"]) == ("RewardModel", "{prompt}{response}")
    assert reward["rewardModel"]["component"] == "helpful_model"
    served = component(spec_of(text), "helpful_model")
    assert (served["role"], served["placement"], served["model"]) == (
        "Judge",
        {"deviceMapping": "list(range(4,8))"},
        {"path": "some/reward"},
    )
    assert "becomes a RewardModel" in notes(text, "rewards.helpful.worker_cls")[0].why


class TestJudges:
    def judge(self, config: str) -> tuple[dict[str, Any], str]:
        text = f"exp_name: a\nrewards: {{llm_judge: {{worker_cls: {WORKERS}.llm_judge_reward_worker.LLMJudgeRewardWorker, {config}}}}}"
        (reward,) = spec_of(text)["rewards"]
        assert (reward["name"], reward["type"]) == ("llm-judge", "LLMJudge")
        judge: dict[str, Any] = reward["judge"]
        return judge, text

    def test_an_endpoint_is_asked_as_in_the_file_and_the_key_is_never_shown(self) -> None:
        judge, text = self.judge("judge_api_url: 'https://api.example.com/v1', judge_model_name: big, judge_api_key: sk-secret-1")
        assert judge["endpoint"] == {"url": "https://api.example.com/v1", "model": "big", "apiKeyEnv": "JUDGE_API_KEY"}
        assert judge["sampling"] == {}
        (group,) = spec_of(text)["nodeGroups"]
        assert group["env"] == [{"name": "JUDGE_API_KEY", "valueFrom": {"secretKeyRef": {"name": "rljob-secrets", "key": "JUDGE_API_KEY"}}}]
        assert "Secret rljob-secrets" in notes(text, "rewards.llm_judge.judge_api_key")[0].why
        assert "sk-secret-1" not in str(convert("roll", text))

    def test_a_judge_samples_with_rolls_defaults(self) -> None:
        judge, text = self.judge("judge_model_type: inference, generating_args: {temperature: 0.3, max_new_tokens: 512}")
        assert judge["sampling"] == {"temperature": 0.3, "top_p": 0.7, "top_k": 50, "max_tokens": 512}
        assert [notes(text, f"rewards.llm_judge.generating_args.{key}")[0].value for key in ("top_p", "top_k")] == ["0.7", "50"]

    def test_a_model_on_devices_becomes_a_judge_there(self) -> None:
        judge, text = self.judge(
            "judge_model_type: inference, judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt, model_args: {model_name_or_path: some/judge}, "
            "generating_args: {max_new_tokens: 100, top_p: 0.8, top_k: 50, temperature: 0.8, num_beams: 1, num_return_sequences: 1}, "
            "strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.7, max_model_len: 8000, "
            "tensor_parallel_size: 2, block_size: 16}}, device_mapping: 'list(range(0,4))'"
        )
        assert judge["component"] == "llm_judge_model"
        assert judge["sampling"] == {"temperature": 0.8, "top_p": 0.8, "top_k": 50, "max_tokens": 100}
        spec = spec_of(text)
        assert component(spec, "llm_judge_model") == {
            "name": "llm_judge_model",
            "role": "Judge",
            "placement": {"deviceMapping": "list(range(0,4))", "devicesPerWorker": 2},
            "model": {"path": "some/judge"},
            "engine": {"tensorParallelSize": 2, "memoryFraction": 0.7, "extraArgs": {"max_model_len": 8000}},
        }
        assert component(spec, "reward")["placement"] == {"workers": 1}
        assert notes(text, "rewards.llm_judge.strategy_args.strategy_config.block_size")[0].kind is NoteKind.DROPPED

    def test_rewards_of_a_cluster_ask_its_one_model(self) -> None:
        worker = f"worker_cls: {WORKERS}.llm_judge_reward_worker.LLMJudgeRewardWorker, judge_model_type: cluster, world_size: 4"
        model = "reward_model: {model_args: {model_name_or_path: some/judge}, device_mapping: '[6, 7]', num_gpus_per_worker: 2}"
        spec = spec_of(f"exp_name: a\nrewards: {{one: {{{worker}}}, two: {{{worker}}}}}\n{model}")
        assert [reward["judge"]["component"] for reward in spec["rewards"]] == ["reward_model"] * 2
        assert component(spec, "reward_model")["placement"] == {"deviceMapping": "[6, 7]", "devicesPerWorker": 2}
        assert component(spec, "reward")["placement"] == {"workers": 8}

    def test_models_that_judge_on_the_same_devices_share_their_memory(self) -> None:
        def reward(fraction: float) -> str:
            engine = f"strategy_args: {{strategy_config: {{gpu_memory_utilization: {fraction}}}}}"
            model = "model_args: {model_name_or_path: some/reward}, device_mapping: 'list(range(0,4))'"
            return f"{{worker_cls: roll.pipeline.base_worker.RewardWorker, {model}, {engine}}}"

        text = f"exp_name: a\nrewards: {{one: {reward(0.8)}, two: {reward(0.3)}}}"
        spec = spec_of(text)
        assert [component(spec, f"{name}_model")["engine"]["memoryFraction"] for name in ("one", "two")] == [0.45, 0.3]
        (note,) = notes(text, "rewards.one.strategy_args.strategy_config.gpu_memory_utilization")
        assert "becomes 0.45" in note.why

    def test_a_judge_without_memory_keeps_rljobs_fraction(self) -> None:
        model = "model_args: {model_name_or_path: some/judge}, device_mapping: '[4]', strategy_args: {strategy_config: "
        text = f"judge_model_type: inference, {model}{{gpu_memory_utilization: 0}}}}"
        served = component(spec_of(self.judge(text)[1]), "llm_judge_model")
        assert "memoryFraction" not in served.get("engine", {})

    def test_a_model_whose_devices_are_not_named_is_to_be_served(self) -> None:
        judge, text = self.judge("judge_model_type: inference, model_args: {model_name_or_path: some/judge}")
        assert judge["endpoint"] == {"url": "http://judge:8000/v1", "model": "some/judge"}
        (note,) = notes(text, "rewards.llm_judge.judge_model_type")
        assert (note.kind, "has to be served" in note.why) == (NoteKind.ASSUMED, True)
        assert "vllm serve some/judge" in note.remedy

    def test_each_of_many_processes_may_ask(self) -> None:
        assert "limits" not in self.judge("world_size: 64")[0]
        assert self.judge("world_size: 65")[0]["limits"] == {"inFlight": 65}

    @pytest.mark.parametrize(("said", "score"), [("YES", 1.0), ("Well, yes.", 1.0), ("No", 0.0), ("", 0.0), ("a\nyes or\nno", 1.0)])
    def test_words_score_as_in_roll(self, said: str, score: float) -> None:
        parser = self.judge("judge_model_type: inference")[0]["parser"]
        matches = re.findall(parser["pattern"], said)
        assert (parser["values"][matches[-1].casefold()] if matches else parser["otherwise"]) == score


class TestTemplates:
    @pytest.mark.parametrize("text", ["global_template: qwen3", "actor_train: {data_args: {template: qwen3}}"])
    def test_a_template_is_the_tokenizers(self, text: str) -> None:
        assert spec_of(f"exp_name: a\n{text}")["data"]["prompt"] == {"chatTemplate": True}

    def test_without_one_prompts_are_plain(self) -> None:
        assert "prompt" not in spec_of("exp_name: a")["data"]

    def test_the_global_one_counts(self) -> None:
        text = "exp_name: a\nglobal_template: qwen3\nactor_train: {data_args: {template: qwen2_5}}"
        assert "qwen3 counts" in notes(text, "actor_train.data_args.template")[0].why


class TestEngine:
    def engine(self, config: str = "", dtype: str = "") -> dict[str, Any]:
        args = f"strategy_args: {{strategy_name: vllm, strategy_config: {{{config}}}}}"
        text = f"prompt_length: 100\nresponse_length: 200\nactor_infer: {{device_mapping: '[0]', {args}, model_args: {{{dtype}}}}}"
        engine: dict[str, Any] = component(spec_of(text), "actor_infer")["engine"]
        return engine

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ("block_size: 16", {"block_size": 16}),
            ("max_model_len: 300", {"max_model_len": 300}),
            ("max_model_len: 299, block_size: 16", {"block_size": 16}),
            ("disable_log_stats: true", None),
            ("distributed_executor_backend: mp", None),
        ],
    )
    def test_arguments_go_to_the_engine_by_its_own_names(self, config: str, expected: dict[str, Any] | None) -> None:
        assert self.engine(config).get("extraArgs") == expected

    @pytest.mark.parametrize("fraction", ["gpu_memory_utilization", "mem_fraction_static"])
    def test_no_memory_is_no_fraction(self, fraction: str) -> None:
        kind = "sglang" if fraction == "mem_fraction_static" else "vllm"
        args = f"strategy_args: {{strategy_name: {kind}, strategy_config: {{{fraction}: 0}}}}"
        text = f"actor_infer: {{device_mapping: '[0]', {args}}}"
        assert "memoryFraction" not in component(spec_of(text), "actor_infer")["engine"]
        assert notes(text, f"actor_infer.strategy_args.strategy_config.{fraction}")[0].kind is NoteKind.UNKNOWN

    @pytest.mark.parametrize(("dtype", "expected"), [("dtype: fp16", "float16"), ("dtype: bf16", None), ("", None)])
    def test_a_dtype_of_its_own(self, dtype: str, expected: str | None) -> None:
        assert self.engine(dtype=dtype).get("dtype") == expected

    def test_training_in_float16_becomes_bfloat16(self) -> None:
        text = "actor_train: {model_args: {dtype: fp16}}\nactor_infer: {model_args: {dtype: fp16}}"
        spec = spec_of(text)
        assert spec["model"]["dtype"] == "bfloat16"
        assert component(spec, "actor_infer")["engine"]["dtype"] == "float16"
        assert "loss scaling" in notes(text, "actor_train.model_args.dtype")[0].why


class TestSchedules:
    @pytest.mark.parametrize(
        ("kwargs", "schedule", "expected"),
        [
            ("min_lr: 1.0e-7", "cosine_with_min_lr", 1e-7),
            ("min_lr_rate: 0.1", "cosine_with_min_lr", 1e-7),
            ("min_lr: 1.0e-7", "constant", None),
            ("min_lr: 1.0", "cosine_with_min_lr", None),
        ],
    )
    def test_where_it_ends(self, kwargs: str, schedule: str, expected: float | None) -> None:
        args = f"learning_rate: 1.0e-6, lr_scheduler_type: {schedule}, lr_scheduler_kwargs: {{{kwargs}}}"
        training = spec_of(f"actor_train: {{training_args: {{{args}}}}}")["training"]
        assert training.get("minLearningRate") == (None if expected is None else pytest.approx(expected))


class TestRatio:
    def test_a_ratio_that_is_one_upstream_is_said(self) -> None:
        assert "ratio is 1" in notes("exp_name: a", "actor_train.old_log_probs")[0].why

    def test_several_updates_compare_with_the_policy_of_the_step(self) -> None:
        assert spec_of("ppo_epochs: 2")["algorithm"]["offPolicy"] == {"proximal": "Recompute"}
        assert notes("ppo_epochs: 2", "actor_train.old_log_probs") == []


@pytest.mark.parametrize(("infer", "trained", "dropped"), [("/m/sft", "/m/sft", "pretrain"), (None, "/m/base", "actor_train")])
def test_pretrain_is_overruled_where_all_three_roles_name_their_model(infer: str | None, trained: str, dropped: str) -> None:
    """ROLL's PPOConfig takes ``pretrain`` for all of them as soon as one has no path."""
    named = "model_args: {model_name_or_path: /m/sft}"
    roles = f"actor_train: {{device_mapping: '[0, 1]', {named}}}\nreference: {{device_mapping: '[0, 1]', {named}}}\n"
    roles += f"actor_infer: {{device_mapping: '[2, 3]', strategy_args: {{strategy_name: vllm}}{', ' + named if infer else ''}}}\n"
    result = convert("roll", f"pretrain: /m/base\nrollout_batch_size: 8\nresponse_length: 512\n{roles}")
    assert result.manifest["spec"]["model"]["path"] == trained
    assert any(note.path.startswith(dropped) and "ROLL takes" in note.why for note in result.notes)
