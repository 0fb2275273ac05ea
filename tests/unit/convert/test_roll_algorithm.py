"""ROLL's learning rule, overlap and validation as fields of the manifest: what each key means, and that the result is a valid job."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_convert import conversion
from rljob_convert.keys import KeyTable, note_leftovers
from rljob_convert.notes import Note, NoteKind
from rljob_convert.source import read
from tests.unit.convert import cases

BASE = """
num_return_sequences_in_group: 4
rollout_batch_size: 8
response_length: 512
actor_train: {device_mapping: '[0, 1]'}
actor_infer: {device_mapping: '[2, 3]', strategy_args: {strategy_name: vllm}}
"""
OF_TRAINER = "actor_train: {device_mapping: '[0, 1]'}"


def converted(more: str) -> conversion.Converted:
    return conversion.convert("roll", f"{BASE}{more}\n")


def spec_of(more: str) -> dict[str, Any]:
    """The spec of a job that runs as it is."""
    result = converted(more)
    assert [str(problem) for problem in conversion.problems(result)] == []
    spec: dict[str, Any] = result.manifest["spec"]
    return spec


def notes(more: str, path: str) -> list[Note]:
    return [note for note in converted(more).notes if note.path == path]


def test_the_documented_async_config_runs_as_it_is() -> None:
    result = cases.converted(cases.FOLDER / "roll-rlvr-async.yaml")
    assert [str(problem) for problem in conversion.problems(result)] == []
    spec = result.manifest["spec"]
    assert spec["overlap"] == {"asyncGenerationRatio": 1.0, "updateMode": "Interrupt"}
    assert spec["training"]["tensorParallelSize"] == 2


def test_a_config_with_every_knob_runs_as_it_is() -> None:
    result = cases.converted(cases.FOLDER / "roll-rlvr-ppo.yaml")
    assert [str(problem) for problem in conversion.problems(result)] == []
    assert "critic" in {component["name"] for component in result.manifest["spec"]["components"]}


PPO = {"variant": "PPO", "clipLow": 0.2, "clipHigh": 0.2, "dualClip": 0}
"""ROLL's loss without settings."""


@pytest.mark.parametrize(
    ("text", "advantage", "reward"),
    [
        ("adv_estimator: grpo", {"estimator": "GRPO"}, None),
        ("adv_estimator: grpo\nnorm_mean_type: batch", {"estimator": "GRPO"}, None),
        (
            "adv_estimator: grpo\nreward_clip: 5",
            {"estimator": "Reinforce"},
            {"center": "Group", "scale": "Group", "clip": 5.0},
        ),
        ("adv_estimator: grpo\nadd_token_level_kl: true", {"estimator": "Reinforce"}, {"center": "Group", "scale": "Group"}),
        ("adv_estimator: grpo\nuse_kl_loss: true\nkl_loss_coef: 0.1", {"estimator": "GRPO"}, None),
        ("adv_estimator: reinforce", {"estimator": "Reinforce"}, None),
        ("adv_estimator: reinforce\nwhiten_advantages: true", {"estimator": "Reinforce", "whiten": True}, None),
        (
            "adv_estimator: reinforce\nnorm_mean_type: group\nnorm_std_type: batch\ngamma: 0.9\nadvantage_clip: 2",
            {"estimator": "Reinforce", "gamma": 0.9, "clip": 2.0},
            {"center": "Group", "scale": "Batch"},
        ),
        ("adv_estimator: gae\nlambd: 0.9\ngamma: 1", {"estimator": "GAE", "lambda": 0.9, "whiten": False}, None),
        ("", {"estimator": "Reinforce"}, None),
        ("critic: {device_mapping: '[0, 1]'}", {"estimator": "GAE", "whiten": False}, None),
    ],
)
def test_estimators(text: str, advantage: dict[str, Any], reward: dict[str, Any] | None) -> None:
    algorithm = spec_of(text)["algorithm"]
    assert (algorithm["advantage"], algorithm.get("reward")) == (advantage, reward)


def test_gae_brings_its_critic() -> None:
    spec = spec_of("adv_estimator: gae\nppo_epochs: 2\nvalue_clip: 0.5\ncritic_warmup: 5\ncritic: {training_args: {learning_rate: 0.001}}")
    (critic,) = [component for component in spec["components"] if component["role"] == "Critic"]
    assert critic["placement"] == {"deviceMapping": "[0, 1]"}
    defaults = {"schedule": "Linear", "learningRateWarmupSteps": 0, "weightDecay": 0.0}
    assert spec["algorithm"]["critic"] == {"learningRate": 0.001, "valueClip": 0.5, "warmupSteps": 5, **defaults}


def test_the_critics_own_optimizer() -> None:
    args = "learning_rate: 0.001, lr_scheduler_type: cosine, lr_scheduler_kwargs: {min_lr_rate: 0.1}, warmup_steps: 3, adam_beta1: 0.8"
    critic = spec_of(f"adv_estimator: gae\ncritic: {{training_args: {{{args}, adam_beta2: 0.9, adam_epsilon: 1.0e-6, weight_decay: 0.1}}}}")
    assert critic["algorithm"]["critic"] == {
        "learningRate": 0.001,
        "minLearningRate": pytest.approx(1e-4),
        "schedule": "Cosine",
        "learningRateWarmupSteps": 2,  # 3 updates, of which a step has 2
        "beta1": 0.8,
        "beta2": 0.9,
        "epsilon": 1e-6,
        "weightDecay": 0.1,
    }


def test_values_are_not_clipped_where_they_do_not_move() -> None:
    text = "adv_estimator: gae\nvalue_clip: 0.5\ncritic: {training_args: {learning_rate: 0.001}}"
    assert "valueClip" not in spec_of(text)["algorithm"]["critic"]
    assert notes(text, "value_clip")[0].kind is NoteKind.DROPPED


def test_a_critic_that_nothing_uses_is_left_out() -> None:
    text = "adv_estimator: grpo\nvalue_clip: 0.5\ncritic: {device_mapping: '[4]'}"
    assert all(component["role"] != "Critic" for component in spec_of(text)["components"])
    assert notes(text, "critic")[0].kind is notes(text, "value_clip")[0].kind is NoteKind.DROPPED


@pytest.mark.parametrize(
    ("text", "kl"),
    [
        ("add_token_level_kl: true\nkl_penalty: abs", {"coefficient": 0.2, "estimator": "Abs", "placement": "Reward"}),
        (
            "add_token_level_kl: true\ninit_kl_coef: 0.1\ntarget_kl: 0.5\nkl_horizon: 100",
            {"coefficient": 0.1, "estimator": "K1", "placement": "Reward", "target": 0.5, "horizon": 100},
        ),
        ("add_token_level_kl: true\nkl_horizon: 100", {"coefficient": 0.2, "estimator": "K1", "placement": "Reward"}),
        ("add_token_level_kl: true\ninit_kl_coef: 0\ntarget_kl: 0.5", None),
        ("use_kl_loss: true\nkl_loss_coef: 0.1\ntarget_kl: 0.5", {"coefficient": 0.1, "estimator": "K3"}),
        ("use_kl_loss: true\nadd_token_level_kl: true", {"coefficient": 0.2, "estimator": "K1", "placement": "Reward"}),
        ("use_kl_loss: true", None),
    ],
)
def test_kl(text: str, kl: dict[str, Any] | None) -> None:
    assert spec_of(f"adv_estimator: grpo\n{text}")["algorithm"].get("kl") == kl


@pytest.mark.parametrize(
    ("text", "loss"),
    [
        ("pg_variant: vanilla\npg_clip: 0.1\ndual_clip_loss: true", {"variant": "Vanilla"}),
        ("pg_clip: 0.1\ndual_clip_loss: true", {"variant": "PPO", "clipLow": 0.1, "clipHigh": 0.1, "dualClip": 1.2}),
        (
            "importance_sampling: seq\nuse_pg_clip_range: true\npg_clip_low: 0.1",
            {"variant": "GSPO", "clipLow": 0.1, "clipHigh": 0.2, "dualClip": 0},
        ),
        (
            "pg_variant: topr\nactor_train: {device_mapping: '[0, 1]', topr_negative_weight: 0.5}",
            {"variant": "TOPR", "negativeWeight": 0.5},
        ),
        ("pg_variant: kimi15\nkimi15_tau: 0.3", {"variant": "Kimi15", "tau": 0.3}),
        ("pg_variant: cispo\ncispo_use_unified_mask: true", {"variant": "CISPO", "clipLow": 0.1, "clipHigh": 0.1, "maskClipped": True}),
        ("loss_agg_mode: seq-mean-token-sum-norm", {**PPO, "aggregation": "SeqMeanTokenSumNorm"}),
    ],
)
def test_losses(text: str, loss: dict[str, Any]) -> None:
    base = BASE if "actor_train" not in text else BASE.replace("actor_train: {device_mapping: '[0, 1]'}\n", "")
    result = conversion.convert("roll", f"{base}adv_estimator: grpo\n{text}\n")
    assert [str(problem) for problem in conversion.problems(result)] == []
    found = result.manifest["spec"]["algorithm"]["policyLoss"]
    if "aggregation" not in loss:
        found = {key: value for key, value in found.items() if key != "aggregation"}
    assert found == pytest.approx(loss)


def test_the_correction_is_between_the_step_and_the_engines() -> None:
    text = """
adv_estimator: grpo
train_infer_correction:
  is_weight: {enabled: true, weight_type: geometric}
  filters:
  - {enabled: true, agg_type: sequence, ratio_low: 0.5, ratio_high: 1.5}
  - {enabled: true, agg_type: sequence, ratio_low: 0.4, ratio_high: 1.2}
  - {enabled: true, agg_type: token, ratio_enabled: false}
  - {agg_type: segment}
"""
    assert spec_of(text)["algorithm"]["offPolicy"] == {
        "proximal": "Recompute",
        "weight": {"level": "Geometric", "high": 1.2},
        "masks": [{"level": "Sequence", "low": 0.5, "high": 1.2}],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("enable_old_logprobs_recompute: true", None),
        ("enable_old_logprobs_recompute: true\nppo_epochs: 2", {"proximal": "Recompute"}),
        ("enable_old_logprobs_recompute: true\nppo_epochs: 2\npg_variant: vanilla", None),
        ("ppo_epochs: 2", {"proximal": "Recompute"}),
        ("ppo_epochs: 2\npg_variant: vanilla", None),
        ("enable_old_logprobs_recompute: false\nppo_epochs: 2", {"proximal": "Recompute"}),
        ("force_disable_old_logprobs_recompute: true\nppo_epochs: 2", None),
        ("enable_old_logprobs_recompute: true\nforce_disable_old_logprobs_recompute: true\nppo_epochs: 2", None),
        ("enable_old_logprobs_recompute: true\nadd_token_level_kl: true", {"proximal": "Recompute"}),
        ("train_infer_correction: {is_weight: {enabled: true, upper_bound: ~}}", {"weight": {"level": "Token", "high": 1e6}}),
    ],
)
def test_the_old_policy(text: str, expected: dict[str, Any] | None) -> None:
    found = spec_of(f"adv_estimator: grpo\n{text}")["algorithm"].get("offPolicy")
    assert found == (expected and {"proximal": "Recompute", **expected})


@pytest.mark.parametrize(
    ("text", "key", "kind"),
    [
        ("ppo_epochs: 2", "enable_old_logprobs_recompute", NoteKind.ASSUMED),
        ("enable_old_logprobs_recompute: false\nppo_epochs: 2", "enable_old_logprobs_recompute", NoteKind.DIFFERENT),
        ("force_disable_old_logprobs_recompute: true\nppo_epochs: 2", "force_disable_old_logprobs_recompute", NoteKind.DROPPED),
        ("force_disable_old_logprobs_recompute: true", "force_disable_old_logprobs_recompute", NoteKind.DROPPED),
    ],
)
def test_what_roll_recomputes_by_itself_is_reported(text: str, key: str, kind: NoteKind) -> None:
    assert [note.kind for note in notes(f"adv_estimator: grpo\n{text}", key)] == [kind]


@pytest.mark.parametrize(
    ("arguments", "lora"),
    [
        ("lora_target: all-linear", {"rank": 8, "alpha": 16.0}),
        ("lora_target: 'q_proj,v_proj', lora_rank: 4", {"rank": 4, "alpha": 8.0, "targetModules": ["q_proj", "v_proj"]}),
        ("lora_rank: 4, lora_alpha: 2", None),
    ],
)
def test_adapters_are_trained_where_they_have_a_target(arguments: str, lora: dict[str, Any] | None) -> None:
    trainer = f"actor_train: {{device_mapping: '[0, 1]', model_args: {{{arguments}}}}}"
    result = conversion.convert("roll", BASE.replace("actor_train: {device_mapping: '[0, 1]'}", trainer))
    assert result.manifest["spec"]["model"].get("lora") == lora
    noted = {note.path.rsplit(".", 1)[-1] for note in result.notes if "lora" in note.path and note.kind is NoteKind.DROPPED}
    assert noted == (set() if lora else {"lora_rank", "lora_alpha"})


def test_an_upper_bound_below_one_is_reported() -> None:
    text = "adv_estimator: grpo\npg_variant: tis\ntis_upper_bound: 0.5"
    assert spec_of(text)["algorithm"]["policyLoss"]["clipHigh"] == 0
    assert any("below 1" in note.why for note in notes(text, "tis_upper_bound"))


def test_a_warm_up_leaves_a_step_of_the_policys_own_to_the_schedule() -> None:
    arguments = "{warmup_steps: 90, lr_scheduler_type: cosine, gradient_accumulation_steps: 2}"
    base = BASE.replace("'[0, 1]'}", f"'[0, 1]', training_args: {arguments}}}")
    text = "adv_estimator: gae\nmax_steps: 20\ncritic_warmup: 5\ncritic: {device_mapping: '[0, 1]'}"
    result = conversion.convert("roll", f"{base}{text}\n")
    assert [str(problem) for problem in conversion.problems(result)] == []
    assert result.manifest["spec"]["training"]["warmupSteps"] == 14
    (size,) = [note for note in result.notes if note.path == "actor_train.training_args.per_device_train_batch_size"]
    assert (size.kind, size.value) == (NoteKind.ASSUMED, "8")


@pytest.mark.parametrize(
    ("arguments", "text", "steps", "said"),
    [
        # 8 prompts * 4 samples / 2 processes = 16 samples of a process, in updates of 2 * 2
        ("per_device_train_batch_size: 2, gradient_accumulation_steps: 2", "", 5, "a step has 4"),
        ("per_device_train_batch_size: 2, gradient_accumulation_steps: 2", "ppo_epochs: 2", 3, "a step has 8"),
        ("per_device_train_batch_size: 2, gradient_accumulation_steps: 8", "", 20, None),
    ],
)
def test_warm_up_counts_optimizer_updates(arguments: str, text: str, steps: int, said: str | None) -> None:
    trainer = f"actor_train: {{device_mapping: '[0, 1]', training_args: {{{arguments}, warmup_steps: 20}}}}"
    result = conversion.convert("roll", f"{BASE.replace(OF_TRAINER, trainer)}max_steps: 100\n{text}\n")
    assert result.manifest["spec"]["training"]["warmupSteps"] == steps
    found = [note.why for note in result.notes if note.path == "actor_train.training_args.warmup_steps"]
    assert [said in why for why in found if said] == ([True] if said else [])


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 3), (4, 12)])
def test_the_critics_warm_up_counts_its_own_updates(accumulation: int, steps: int) -> None:
    args = f"per_device_train_batch_size: 4, gradient_accumulation_steps: {accumulation}, warmup_steps: 12"
    text = f"adv_estimator: gae\ncritic: {{device_mapping: '[0, 1]', training_args: {{{args}}}}}"
    assert spec_of(text)["algorithm"]["critic"]["learningRateWarmupSteps"] == steps


def test_a_critic_without_batches_has_those_of_roll() -> None:
    text = "adv_estimator: gae\ncritic: {device_mapping: '[0, 1]', training_args: {warmup_steps: 12}}"
    assert spec_of(text)["algorithm"]["critic"]["learningRateWarmupSteps"] == 6  # 8 prompts * 4 samples / 2 processes, 8 at a time
    assert "a step has 2" in notes(text, "critic.training_args.warmup_steps")[0].why


@pytest.mark.parametrize(
    ("worker", "variant", "kind"),
    [
        (None, "TIS", NoteKind.DIFFERENT),
        ("roll.pipeline.rlvr.actor_worker.ActorWorker", "PPO", NoteKind.DROPPED),
        ("roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker", "TIS", None),
        ("mine.Worker", "TIS", None),
    ],
)
def test_a_variant_counts_in_the_workers_that_read_it(worker: str | None, variant: str, kind: NoteKind | None) -> None:
    trainer = f"actor_train: {{device_mapping: '[0, 1]', pg_variant: tis{'' if worker is None else f', worker_cls: {worker}'}}}"
    result = conversion.convert("roll", BASE.replace(OF_TRAINER, trainer))
    assert result.manifest["spec"]["algorithm"]["policyLoss"]["variant"] == variant
    assert [note.kind for note in result.notes if note.path == "actor_train.pg_variant"] == ([] if kind is None else [kind])


@pytest.mark.parametrize(("domains", "noted"), [(1, 0), (2, 1)])
def test_statistics_of_each_domain_by_itself_are_reported(domains: int, noted: int) -> None:
    rewards = "".join(f"  domain_{index}: {{worker_cls: x.MathRuleRewardWorker, tag_included: [t{index}]}}\n" for index in range(domains))
    text = f"adv_estimator: reinforce\nwhiten_advantages: true\nnorm_mean_type: batch\nnorm_std_type: group\nrewards:\n{rewards}"
    found = {key: len(notes(text, key)) for key in ("whiten_advantages", "norm_mean_type", "norm_std_type")}
    assert found == {"whiten_advantages": noted, "norm_mean_type": noted, "norm_std_type": 0}


@pytest.mark.parametrize(("probabilities", "noted"), [("{math: 1.0}", 1), ("{math: 0.5, code: 0.5}", 0)])
def test_several_files_are_sampled_alike(probabilities: str, noted: int) -> None:
    data = f"{{file_name: [a.jsonl, b.jsonl], domain_interleave_probs: {probabilities}}}"
    result = conversion.convert("roll", BASE.replace(OF_TRAINER, f"actor_train: {{device_mapping: '[0, 1]', data_args: {data}}}"))
    assert sum("whatever its size" in note.why for note in result.notes) == noted
    shares = [note for note in result.notes if "by the domain that the tag" in note.why]
    assert [note.remedy.partition(" with ")[2] for note in shares] == ["weight 0.5 for math, weight 0.5 for code"] * (1 - noted)


def trainer_of(strategy: str, args: str, config: str = "{}") -> conversion.Converted:
    strategy_args = f"{{strategy_name: {strategy}, strategy_config: {config}}}"
    trainer = f"actor_train: {{device_mapping: '[0, 1]', strategy_args: {strategy_args}, training_args: {args}}}"
    return conversion.convert("roll", BASE.replace(OF_TRAINER, trainer))


@pytest.mark.parametrize("strategy", ["megatron_train", "fsdp2_train"])
@pytest.mark.parametrize("given", ["min_lr_rate: 0.1", "min_lr: 1.0e-6"])
def test_settings_of_the_optimizer_that_rolls_loader_drops_count_and_are_reported(strategy: str, given: str) -> None:
    args = f"{{lr_scheduler_type: cosine, lr_scheduler_kwargs: {{{given}}}, learning_rate: 1.0e-5, adam_epsilon: 1.0e-6}}"
    result = trainer_of(strategy, args)
    training = result.manifest["spec"]["training"]
    assert (training["minLearningRate"], training["epsilon"]) == (pytest.approx(1e-6), 1e-6)
    assert sum("ROLL's loader drops it" in note.why for note in result.notes) == 2


def test_megatron_reads_settings_of_the_optimizer_beside_its_sizes() -> None:
    args = "{lr_scheduler_type: cosine, lr_scheduler_kwargs: {min_lr: 5.0e-6}, learning_rate: 1.0e-5}"
    config = "{lr_scheduler_kwargs: {min_lr: 1.0e-6}, adam_epsilon: 1.0e-6}"
    result = trainer_of("megatron_train", args, config)
    training = result.manifest["spec"]["training"]
    assert (training["minLearningRate"], training["epsilon"]) == (1e-6, 1e-6)
    (note,) = [note for note in result.notes if note.path == "actor_train.training_args.lr_scheduler_kwargs.min_lr"]
    assert note.why == "strategy_config counts"


@pytest.mark.parametrize(
    ("strategy", "word", "warmup"),
    [("fsdp2_train", "constant", 0), ("fsdp2_train", "constant_with_warmup", 20), ("megatron_train", "constant", 20)],
)
def test_the_schedule_constant_of_transformers_has_no_warmup(strategy: str, word: str, warmup: int) -> None:
    args = f"{{lr_scheduler_type: {word}, warmup_steps: 20, per_device_train_batch_size: 16}}"
    result = trainer_of(strategy, args)
    assert result.manifest["spec"]["training"].get("warmupSteps", 0) == warmup
    assert sum("has no warm-up" in note.why for note in result.notes) == (warmup == 0)


def test_a_step_of_warmup_that_has_begun_counts() -> None:
    result = trainer_of("fsdp2_train", "{lr_scheduler_type: linear, warmup_ratio: 0.001}")
    assert result.manifest["spec"]["training"]["warmupSteps"] == 1


def test_default_batches_are_rolls() -> None:
    trainer = "actor_train: {device_mapping: '[0, 1]', training_args: {learning_rate: 1.0e-6}}"
    result = conversion.convert("roll", BASE.replace(OF_TRAINER, trainer))
    assert result.manifest["spec"]["training"]["miniBatches"] == 2  # 8 prompts * 4 samples / 2 processes, 8 at a time
    path = "actor_train.training_args.per_device_train_batch_size"
    assert [note.kind for note in result.notes if note.path == path] == [NoteKind.ASSUMED]


def test_an_environment_that_nobody_plays_is_one_note() -> None:
    play = "sequence_length: 64\ntrain_env_manager: {tags: [a]}\n"
    text = f"{play}custom_envs: {{a: {{env_type: frozen_lake}}, b: {{env_type: sokoban, max_steps: 3, env_config: {{dim_x: 5}}}}}}"
    found = [note for note in converted(text).notes if note.path.startswith("custom_envs.b")]
    assert [(note.path, note.why) for note in found] == [("custom_envs.b", "no manager of the file names this tag")]


def test_agentic_jobs_have_no_masks_upstream() -> None:
    text = "max_len_mask: true\ndifficulty_mask: true\ndifficulty_low_threshold: 0.1\nlength_loss_weight: true\nerror_max_len_clip: false"
    result = converted(f"{text}\ntrain_env_manager: {{tags: [a], group_size: 4}}\nsequence_length: 64")
    assert not {"filters", "sampleWeights"} & result.manifest["spec"]["algorithm"].keys()
    for key in ("max_len_mask", "difficulty_mask", "difficulty_low_threshold", "length_loss_weight"):
        (note,) = [note for note in result.notes if note.path == key]
        assert "agentic pipeline does not read it" in note.why


@pytest.mark.parametrize(("samples", "expected"), [(1, None), (2, {"minGroupMean": 0.1, "maxGroupMean": 1.0})])
def test_a_single_response_is_never_too_hard(samples: int, expected: dict[str, Any] | None) -> None:
    base = BASE.replace("in_group: 4", f"in_group: {samples}")
    result = conversion.convert("roll", f"{base}difficulty_mask: true\ndifficulty_low_threshold: 0.1\n")
    assert result.manifest["spec"]["algorithm"].get("filters") == expected
    assert ("difficulty_mask" in {note.path for note in result.notes}) is (expected is None)


@pytest.mark.parametrize(
    ("threshold", "place", "said"),
    [
        ("", "error_max_len_clip", "without error_max_len_threshold none is too long; ROLL also leaves out scores other than 0 and 1"),
        ("error_max_len_threshold: -1", "error_max_len_clip", "error_max_len_threshold cannot be used; ROLL also"),
        ("error_max_len_threshold: 513", "error_max_len_threshold", "longer than 512 tokens; ROLL also"),
        ("error_max_len_threshold: 512", "error_max_len_clip", "did not pass; ROLL also"),
    ],
)
def test_a_clip_of_failures_tells_what_it_leaves_out_upstream(threshold: str, place: str, said: str) -> None:
    text = f"error_max_len_clip: true\n{threshold}"
    found = [note.why for key in ("error_max_len_clip", "error_max_len_threshold") for note in notes(text, key) if "ROLL" in note.why]
    assert [said in why for why in found] == [True]
    assert said in notes(text, place)[0].why
    assert ("filters" in converted(text).manifest["spec"]["algorithm"]) is (": 512" in threshold)


@pytest.mark.parametrize(
    ("key", "said"),
    [("repetition_penalty: 1.1", "would bend"), ("do_sample: false", "always samples"), ("bad_words: [a]", "stopStrings")],
)
def test_sampling_that_rljob_does_not_have(key: str, said: str) -> None:
    engine = f"actor_infer: {{device_mapping: '[2, 3]', generating_args: {{{key}}}}}"
    (note,) = [note for note in conversion.convert("roll", engine).notes if note.path == f"actor_infer.generating_args.{key.split(':')[0]}"]
    assert said in note.why


def test_a_field_that_other_settings_leave_unused_is_named() -> None:
    assert "no use for algorithm.critic.valueClip (gae)" in notes("adv_estimator: grpo\nvalue_clip: 0.5", "value_clip")[0].why


def test_what_explains_a_row_of_the_table_is_no_name_of_a_field() -> None:
    table = KeyTable(framework="X", mapped={"a": "training.steps: with b", "b": "nodeGroups[].nodes, which follow"}, dropped={}, dead={})
    source = read("a: 1\nb: 2", "X")
    note_leftovers(source, table)
    assert [note.why.partition("no use for ")[2] for note in source.notes] == ["training.steps", "nodeGroups[].nodes"]


@pytest.mark.parametrize(
    ("inside", "found"),
    [
        ("logging_steps: 1", []),
        ("logging_steps: 1, max_steps: 3", [("", NoteKind.DROPPED)]),
        ("logging_steps: 2", [("", NoteKind.DROPPED)]),
        ("logging_step: 1, other: 3", [(".logging_step", NoteKind.UNKNOWN), (".other", NoteKind.DROPPED)]),
        ("logging_steps: '${nowhere}'", [("", NoteKind.DROPPED)]),
    ],
)
def test_a_section_of_which_nothing_is_lost_is_no_note(inside: str, found: list[tuple[str, NoteKind]]) -> None:
    section = "actor_infer.training_args"
    engine = f"actor_infer: {{device_mapping: '[2, 3]', training_args: {{{inside}}}}}"
    result = conversion.convert("roll", f"exp_name: a\n{engine}\n")
    noted = [(note.path.removeprefix(section), note.kind) for note in result.notes if note.path.startswith(section)]
    assert sorted(noted) == sorted(found)


def test_a_section_without_fields_is_one_note() -> None:
    library = "gem_math:\n  a: {env_type: 'math:A', max_steps: 3}\n  b: {env_type: 'math:B', env_config: {dataset_name: b}}\n"
    found = [note.path for note in conversion.convert("roll", f"{BASE}{library}").notes if note.path.startswith("gem_math")]
    assert found == ["gem_math"]


def test_masks_and_weights_of_samples() -> None:
    text = """
adv_estimator: grpo
max_len_mask: true
difficulty_mask: true
error_max_len_clip: true
error_max_len_threshold: 500
difficulty_loss_weight: true
length_loss_weight: false
"""
    algorithm = spec_of(text)["algorithm"]
    assert algorithm["filters"] == {"truncated": True, "minGroupMean": 0.0, "maxGroupMean": 1.0, "maxFailedTokens": 500}
    assert algorithm["sampleWeights"] == {"difficulty": True}


def test_a_bound_that_groups_have_to_keep_is_not_repeated() -> None:
    filters = "rewards: {math: {query_filter_config: {type: mean_filter, filter_args: {threshold_down: 0.1, threshold_up: 2}}}}"
    spec = spec_of(f"adv_estimator: grpo\ndifficulty_mask: true\n{filters}")
    assert spec["rollout"]["groupFilter"] == {"minMean": 0.1, "maxMean": 2.0}
    assert spec["algorithm"]["filters"] == {"maxGroupMean": 1.0}


class TestOverlap:
    def test_additional_prompts(self) -> None:
        assert spec_of("is_use_additional_prompts: true\nmax_additional_running_prompts: 5")["rollout"]["extraPrompts"] == 5
        assert spec_of("is_use_additional_prompts: true")["rollout"]["extraPrompts"] == 16
        assert "extraPrompts" not in spec_of("max_additional_running_prompts: 5")["rollout"]

    @pytest.mark.parametrize(
        ("text", "routing"),
        [
            ("is_num_return_sequences_expand: false", "Together"),
            ("is_num_return_sequences_expand: true", None),
            ("is_num_return_sequences_expand: false\nasync_generation_ratio: 1", None),
            ("", None),
        ],
    )
    def test_one_request_for_a_group(self, text: str, routing: str | None) -> None:
        assert spec_of(text)["rollout"].get("groupRouting") == routing

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ("{type: mean_filter, filter_args: {threshold_up: 0.9}}", {"maxMean": 0.9}),
            ("{type: std_filter, filter_args: {std_threshold: 0}}", {"minStd": 0.0}),
            ("{type: no_filter}", None),
            ("{type: mean_filter, filter_args: {threshold_up: .inf, threshold_down: 0.1}}", {"minMean": 0.1}),
        ],
    )
    def test_filters_of_groups(self, config: str, expected: dict[str, float] | None) -> None:
        assert spec_of(f"rewards: {{math: {{query_filter_config: {config}}}}}")["rollout"].get("groupFilter") == expected


class TestValidation:
    def text(self, arguments: str = "{}", more: str = "eval_steps: 5") -> str:
        return f"{more}\nvalidation: {{data_args: {{file_name: [a.jsonl]}}, generating_args: {arguments}}}"

    def test_sampling(self) -> None:
        arguments = "{temperature: 0.6, top_p: 0.9, top_k: 20, num_return_sequences: 4}"
        text = self.text(arguments, "eval_steps: 5\nval_batch_size: 8\nval_prompt_length: 1024\nval_sequence_length: 1124")
        assert spec_of(text)["validation"] == {
            "everySteps": 5,
            "maxPrompts": 1_000_000,
            "samplesPerPrompt": 4,
            "maxResponseTokens": 100,
            "temperature": 0.6,
            "topP": 0.9,
            "topK": 20,
        }

    def test_greedy_answers_need_no_further_settings(self) -> None:
        text = self.text("{temperature: 0, top_p: 0.9, top_k: 20, num_return_sequences: 4, max_new_tokens: 9999}")
        assert spec_of(text)["validation"] == {"everySteps": 5, "maxPrompts": 1_000_000, "temperature": 0.0}
        for key in ("top_p", "top_k", "num_return_sequences", "max_new_tokens"):
            assert notes(text, f"validation.generating_args.{key}")

    @pytest.mark.parametrize(
        ("more", "tokens", "why"),
        [
            ("", None, "ROLL overwrites it with 512"),
            ("\nval_prompt_length: 1000\nval_sequence_length: 1200", 200, "ROLL overwrites it with 200"),
            ("\nval_prompt_length: 1000\nval_sequence_length: 1100", 100, ""),
            ("\nval_prompt_length: 1000\nval_sequence_length: 9000", None, "ROLL overwrites it with 8000"),
            ("\nval_sequence_length: 1100", None, "ROLL overwrites it with 512"),
        ],
    )
    def test_answers_have_what_a_prompt_leaves_of_a_sequence(self, more: str, tokens: int | None, why: str) -> None:
        text = self.text("{max_new_tokens: 100}", f"eval_steps: 5{more}")
        assert spec_of(text)["validation"].get("maxResponseTokens") == tokens
        assert [note.why[: len(why)] for note in notes(text, "validation.generating_args.max_new_tokens")] == ([why] if why else [])
        assert len(notes(text, "val_sequence_length")) == (tokens is None and "val_sequence" in more)
        assert len(notes(text, "val_prompt_length")) == ("val_prompt" in more)

    def test_roll_s_defaults_are_written_out(self) -> None:
        assert spec_of(self.text(more=""))["validation"] == {
            "everySteps": 10,
            "maxPrompts": 1_000_000,
            "temperature": 0.95,
            "topP": 0.7,
            "topK": 50,
        }

    def test_without_steps_nothing_is_asked(self) -> None:
        spec = spec_of(self.text("{temperature: 1.0}", "eval_steps: 0"))
        assert "validation" not in spec
        assert "validation" not in spec["data"]
