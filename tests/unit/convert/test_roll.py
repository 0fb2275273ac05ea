"""ROLL configurations to manifests, key by key; test_configurations.py does whole files."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_convert import conversion
from rljob_convert.notes import Note, NoteKind
from tests.unit.convert import cases
from tests.unit.convert.cases import component


def spec_of(text: str, **options: Any) -> dict[str, Any]:
    return cases.spec_of("roll", text, **options)


def notes(text: str, path: str) -> list[Note]:
    return cases.notes("roll", text, path)


class TestPlacement:
    def test_the_documented_example(self) -> None:
        plan = cases.plan(cases.converted(cases.FOLDER / "roll-doc-resources.yaml"))
        assert [(item.name, item.world_size) for item in plan.components] == [("actor_train", 16), ("actor_infer", 6), ("reward", 8)]
        assert len(plan.nodes) == 2

    def test_async_rlvr(self) -> None:
        plan = cases.plan(cases.converted(cases.FOLDER / "roll-rlvr-async.yaml"))
        assert len(plan.nodes) == 3
        assert [item.world_size for item in plan.components] == [16, 8, 1]

    @pytest.mark.parametrize(
        ("highest", "per_node", "nodes", "devices"), [(3, None, 1, 4), (7, None, 1, 8), (8, None, 2, 8), (3, 2, 2, 2), (11, 4, 3, 4)]
    )
    def test_nodes_hold_the_highest_rank(self, highest: int, per_node: int | None, nodes: int, devices: int) -> None:
        text = f"actor_train: {{device_mapping: '[0]'}}\nactor_infer: {{device_mapping: '[{highest}]'}}\n"
        text += f"num_gpus_per_node: {per_node}\n" if per_node else ""
        assert spec_of(text)["nodeGroups"] == [{"name": "gpu", "nodes": nodes, "devicesPerNode": devices}]

    def test_vllm_takes_its_size_from_its_parallelism(self) -> None:
        text = """
actor_train: {device_mapping: "list(range(0,4))"}
actor_infer:
  device_mapping: "list(range(4,12))"
  num_gpus_per_worker: 8
  strategy_args: {strategy_name: vllm, strategy_config: {tensor_parallel_size: 2, pipeline_parallel_size: 2}}
"""
        infer = component(spec_of(text), "actor_infer")
        assert infer["placement"] == {"deviceMapping": "list(range(4,12))", "devicesPerWorker": 4}
        assert (infer["engine"]["tensorParallelSize"], infer["engine"]["pipelineParallelSize"]) == (2, 2)
        assert "overwrites it" in notes(text, "actor_infer.num_gpus_per_worker")[0].why

    def test_sglang_takes_the_given_size(self) -> None:
        spec = spec_of((cases.FOLDER / "roll-agentic-full.yaml").read_text())
        infer = component(spec, "actor_infer")
        assert infer["placement"] == {"deviceMapping": "list(range(4,6)) + list(range(8,14))", "devicesPerWorker": 2}
        assert infer["engine"]["type"] == "SGLang"

    def test_rewards_become_one_component_with_the_sum_of_workers(self) -> None:
        spec = spec_of((cases.FOLDER / "roll-rlvr-full.yaml").read_text(), folder=cases.FOLDER)
        assert component(spec, "reward")["placement"] == {"workers": 8 + 8 + 1}
        assert [reward["type"] for reward in spec["rewards"]] == ["Code", "MathRule", "LLMJudge"]

    @pytest.mark.parametrize(("ratio", "mapping"), [(0, "list(range(0,8))"), (1, "list(range(0,16))")])
    def test_engines_beside_the_trainer_need_a_ratio(self, ratio: int, mapping: str) -> None:
        text = "actor_train: {device_mapping: 'list(range(0,8))'}\nactor_infer: {device_mapping: 'list(range(0,16))'}\n"
        text += f"async_generation_ratio: {ratio}"
        assert component(spec_of(text), "actor_infer")["placement"]["deviceMapping"] == mapping
        assert len([note for note in notes(text, "actor_infer.device_mapping") if "would wait" in note.why]) == 1 - ratio

    def test_a_mapping_that_python_would_have_to_run_is_kept_and_named(self) -> None:
        text = "actor_train: {device_mapping: '[i for i in range(8)]'}"
        assert any("is kept, but no placement" in note.why for note in notes(text, "actor_train.device_mapping"))
        assert any("deviceMapping" in problem.path for problem in conversion.problems(conversion.convert("roll", text)))


class TestLearning:
    @pytest.mark.parametrize(
        ("config", "updates"), [("tensor_model_parallel_size: 1", 1), ("tensor_model_parallel_size: 2", 2), ("context_parallel_size: 4", 4)]
    )
    def test_mini_batches_are_the_updates_roll_makes(self, config: str, updates: int) -> None:
        text = f"""
rollout_batch_size: 64
num_return_sequences_in_group: 8
actor_train:
  device_mapping: "list(range(0,16))"
  training_args: {{per_device_train_batch_size: 1, gradient_accumulation_steps: 32}}
  strategy_args: {{strategy_name: megatron_train, strategy_config: {{{config}}}}}
"""
        training = spec_of(text)["training"]
        assert training["miniBatches"] == updates
        assert training.get("contextParallelSize", 1) == (4 if "context" in config else 1)

    @pytest.mark.parametrize(("tensor", "expected"), [(2, True), (1, None)])
    def test_tokens_are_divided_where_layers_are(self, tensor: int, expected: bool | None) -> None:
        sizes = f"{{tensor_model_parallel_size: {tensor}, sequence_parallel: true}}"
        strategy = f"{{strategy_name: megatron_train, strategy_config: {sizes}}}"
        text = f"actor_train: {{device_mapping: 'list(range(0,16))', strategy_args: {strategy}}}"
        assert spec_of(text)["training"].get("sequenceParallel") is expected
        assert not notes(text, "actor_train.strategy_args.strategy_config.sequence_parallel")

    def test_devices_that_share_sequences_have_fewer_tokens_each(self) -> None:
        text = """
prompt_length: 1024
response_length: 3072
actor_train:
  device_mapping: "list(range(0,16))"
  model_args: {ulysses_size: 4}
  training_args: {per_device_train_batch_size: 2}
"""
        training = spec_of(text)["training"]
        assert (training["contextParallelSize"], training["microBatchTokens"]) == (4, 2 * 4096 // 4)
        assert not [note for note in notes(text, "actor_train.model_args") if note.kind is NoteKind.DROPPED]

    @pytest.mark.parametrize(("size", "expected"), [(1, None), (8, 8), (3, None)])
    def test_experts_are_divided_where_processes_are(self, size: int, expected: int | None) -> None:
        config = f"{{tensor_model_parallel_size: 2, expert_model_parallel_size: {size}, expert_tensor_parallel_size: 1}}"
        text = f"""
adv_estimator: reinforce
add_token_level_kl: true
init_kl_coef: 0.1
actor_train:
  device_mapping: "list(range(0,16))"
  strategy_args: {{strategy_name: megatron_train, strategy_config: {config}}}
reference:
  device_mapping: "list(range(0,16))"
  strategy_args: {{strategy_name: megatron_infer, strategy_config: {config}}}
"""
        (reference,) = (component for component in spec_of(text)["components"] if component["role"] == "Reference")
        assert reference.get("expertParallelSize") == expected
        assert reference["tensorParallelSize"] == 2
        training, of_trainer = spec_of(text)["training"], "actor_train.strategy_args.strategy_config"
        assert training.get("expertParallelSize") == expected
        assert training["tensorParallelSize"] == 2
        said = [note.why for note in notes(text, f"{of_trainer}.expert_model_parallel_size")]
        assert said == (["does not divide the 16 training processes, which shard experts by FSDP2"] if size == 3 else [])
        other = notes(text, "reference.strategy_args.strategy_config.expert_model_parallel_size")
        assert [note.why for note in other] == (["does not divide its 16 processes, which shard experts by FSDP2"] if size == 3 else [])

    @pytest.mark.parametrize(
        ("config", "expected", "said"),
        [
            ("{moe_router_enable_expert_bias: true, moe_router_bias_update_rate: 0.002}", 0.002, []),
            ("{moe_router_enable_expert_bias: true}", 0.001, ["Megatron's default"]),
            ("{moe_router_bias_update_rate: 0.002}", None, ["has no effect without moe_router_enable_expert_bias"]),
        ],
    )
    def test_biases_of_routers_move_where_megatron_moves_them(self, config: str, expected: float | None, said: list[str]) -> None:
        text = f"""
actor_train:
  device_mapping: "list(range(0,16))"
  strategy_args: {{strategy_name: megatron_train, strategy_config: {config}}}
"""
        assert spec_of(text)["training"].get("routerBiasUpdateRate") == expected
        place = "actor_train.strategy_args.strategy_config.moe_router_bias_update_rate"
        assert [note.why for note in notes(text, place)] == said

    @pytest.mark.parametrize(("strategy", "expected"), [("megatron_train", (2, 4)), ("fsdp2_train", (4, None))])
    def test_a_critic_divides_sequences_as_its_strategy_does(self, strategy: str, expected: tuple[int, int | None]) -> None:
        text = f"""
adv_estimator: gae
actor_train:
  device_mapping: "list(range(0,16))"
  model_args: {{attn_implementation: fa2}}
critic:
  device_mapping: "list(range(0,16))"
  model_args: {{ulysses_size: 4}}
  strategy_args: {{strategy_name: {strategy}, strategy_config: {{context_parallel_size: 2, expert_model_parallel_size: 4}}}}
actor_infer: {{device_mapping: "list(range(0,16))"}}
"""
        converted, place = conversion.convert("roll", text), "critic.strategy_args.strategy_config"
        assert conversion.problems(converted) == ()
        (critic,) = (component for component in spec_of(text)["components"] if component["role"] == "Critic")
        assert (critic.get("contextParallelSize"), critic.get("expertParallelSize")) == expected
        unread = (
            {"critic.model_args.ulysses_size"} if expected[1] else {f"{place}.context_parallel_size", f"{place}.expert_model_parallel_size"}
        )
        assert {note.path for note in converted.notes if note.why == "ROLL's strategy does not read it"} == unread
        assert "attention" not in spec_of(text)["model"], "of those only sdpa computes parts of sequences"
        odd = text.replace("ulysses_size: 4", "ulysses_size: 3").replace("context_parallel_size: 2", "context_parallel_size: 3")
        (note,) = (note for note in conversion.convert("roll", odd).notes if "data-parallel processes" in note.why)
        assert note.why == "does not divide its 16 data-parallel processes"

    @pytest.mark.parametrize(
        ("strategy", "expected", "unread"), [("megatron_train", 4, "ep_size"), ("fsdp2_train", 8, "expert_model_parallel_size")]
    )
    def test_experts_are_divided_as_the_strategy_divides_them(self, strategy: str, expected: int, unread: str) -> None:
        config = "{expert_model_parallel_size: 4, ep_size: 8, efsdp_size: 2}"
        text = f"""
actor_train:
  device_mapping: "list(range(0,16))"
  strategy_args: {{strategy_name: {strategy}, strategy_config: {config}}}
"""
        assert spec_of(text)["training"]["expertParallelSize"] == expected
        place = "actor_train.strategy_args.strategy_config"
        assert [note.why for note in notes(text, f"{place}.{unread}")] == ["ROLL's strategy does not read it"]
        assert "shards the experts" in notes(text, f"{place}.efsdp_size")[0].why

    @pytest.mark.parametrize(
        ("strategy", "sizes", "expected", "dropped"),
        [
            ("megatron_train", (2, 4), 2, "actor_train.model_args.ulysses_size"),
            ("fsdp2_train", (2, 4), 4, "actor_train.strategy_args.strategy_config.context_parallel_size"),
            ("megatron_train", (1, 4), 1, "actor_train.model_args.ulysses_size"),
            ("fsdp2_train", (1, 4), 4, None),
        ],
    )
    def test_sequences_are_shared_as_the_strategy_shares_them(
        self, strategy: str, sizes: tuple[int, int], expected: int, dropped: str | None
    ) -> None:
        text = f"""
actor_train:
  device_mapping: "list(range(0,16))"
  model_args: {{ulysses_size: {sizes[1]}, attn_implementation: fa2}}
  strategy_args: {{strategy_name: {strategy}, strategy_config: {{context_parallel_size: {sizes[0]}}}}}
actor_infer: {{device_mapping: "list(range(0,16))"}}
"""
        converted = conversion.convert("roll", text)
        assert conversion.problems(converted) == ()
        spec = spec_of(text)
        assert spec["training"].get("contextParallelSize", 1) == expected
        assert spec["model"].get("attention") == ("flash_attention_2" if expected == 1 else None)
        said = [(note.path, note.kind) for note in converted.notes]
        assert ((dropped, NoteKind.DROPPED) in said) == (dropped is not None)
        assert (("actor_train.model_args.attn_implementation", NoteKind.DIFFERENT) in said) == (expected > 1)

    def test_agentic_batches_count_trajectories(self) -> None:
        rollout = spec_of((cases.FOLDER / "roll-agentic-full.yaml").read_text())["rollout"]
        assert (rollout["promptsPerStep"], rollout["samplesPerPrompt"]) == (125, 8)
        assert (rollout["maxPromptTokens"], rollout["maxResponseTokens"]) == (8064, 128)

    def test_a_kl_that_nothing_uses_leaves_the_reference_out(self) -> None:
        text = "reference: {device_mapping: '[0]'}\ninit_kl_coef: 0.2"
        assert {item["role"] for item in spec_of(text)["components"]} == {"Trainer", "Rollout", "Reward"}
        assert notes(text, "reference")[0].kind is NoteKind.DROPPED

    def test_a_kl_term_without_reference_gets_one(self) -> None:
        text = "actor_train: {device_mapping: '[0, 1]'}\nuse_kl_loss: true\nkl_loss_coef: 0.1"
        spec = spec_of(text)
        assert spec["algorithm"]["kl"] == {"coefficient": 0.1, "estimator": "K3"}
        assert component(spec, "reference")["placement"] == {"deviceMapping": "[0, 1]"}
        assert notes(text, "reference.device_mapping")[0].kind is NoteKind.ASSUMED

    def test_the_default_kl_is_a_warning(self) -> None:
        assert "default is 0.2" in notes("pretrain: a/b", "init_kl_coef")[0].why


class TestNotes:
    def test_dead_keys_are_named_as_dead(self) -> None:
        (note,) = notes("exp_name: a\nuse_additional_prompts: true", "use_additional_prompts")
        assert note.kind is NoteKind.DROPPED
        assert "is_use_additional_prompts" in note.why

    def test_a_misspelled_key_gets_a_suggestion(self) -> None:
        (note,) = notes("rollot_batch_size: 8\nexp_name: a", "rollot_batch_size")
        assert (note.kind, note.remedy, note.line) == (NoteKind.UNKNOWN, "did you mean rollout_batch_size?", 1)

    def test_a_misspelled_key_inside_a_section(self) -> None:
        (note,) = notes("actor_train: {training_args: {learning_rat: 1.0}}", "actor_train.training_args.learning_rat")
        assert (note.kind, note.remedy) == (NoteKind.UNKNOWN, "did you mean learning_rate?")

    @pytest.mark.parametrize("text", ["max_steps: ${max_steps}", "max_steps: ${a}\na: ${b}\nb: ${a}", "max_steps: ${nothing}"])
    def test_references_that_lead_nowhere(self, text: str) -> None:
        assert any(
            note.kind is NoteKind.UNKNOWN and "cannot be resolved" in note.why for note in notes(f"exp_name: a\n{text}", "max_steps")
        )

    def test_a_value_that_yaml_reads_otherwise_is_noted(self) -> None:
        assert any("base 60" in note.why for note in notes("exp_name: a\nmax_steps: 1:30", "max_steps"))

    @pytest.mark.parametrize("text", ["", "- a", "a: [", "kind: RLJob", "a: 1\n---\nb: 2", "just text"])
    def test_what_is_no_configuration_is_refused(self, text: str) -> None:
        with pytest.raises(SpecInvalidError):
            conversion.convert("roll", text)

    def test_the_name_can_be_given(self) -> None:
        result = conversion.convert("roll", "exp_name: other", name="mine")
        assert result.manifest["metadata"]["name"] == "mine"


class TestOffload:
    def text(self, more: str = "", trainer: str = "", rollout: str = "list(range(0,4))") -> str:
        return (
            f"actor_train: {{device_mapping: 'list(range(0,4))'{trainer}}}\n"
            f"actor_infer: {{device_mapping: '{rollout}', strategy_args: {{strategy_name: vllm}}}}\n{more}"
        )

    def test_roles_on_the_same_devices_switch(self) -> None:
        text = self.text()
        spec = spec_of(text)
        assert spec["offload"] == {"residency": "Switching"}
        assert cases.offload_problems(conversion.convert("roll", text)) == []

    def test_an_optimizer_around_its_step(self) -> None:
        text = self.text("is_offload_optimizer_states_in_train_step: true")
        spec = spec_of(text)
        assert component(spec, "actor_train")["offload"] == {"optimizer": "Always"}
        assert cases.offload_problems(conversion.convert("roll", text)) == []

    def test_states_that_stay(self) -> None:
        text = self.text("is_offload_states: false\nis_offload_optimizer_states_in_train_step: true")
        spec = spec_of(text)
        assert spec["offload"] == {"residency": "Resident"}
        assert "offload" not in component(spec, "actor_train")
        assert [note.kind for note in notes(text, "is_offload_optimizer_states_in_train_step")] == [NoteKind.DROPPED]
        assert cases.offload_problems(conversion.convert("roll", text)) == []

    @pytest.mark.parametrize(
        ("config", "policies"),
        [
            ("{offload_policy: true}", {"optimizer": "Always", "weight": "Always", "grad": "Always"}),
            ("{zero_optimization: {stage: 3, offload_optimizer: {device: cpu}}}", {"optimizer": "Always"}),
            ("{zero_optimization: {stage: 3, offload_param: {device: cpu}}}", {"weight": "Always"}),
        ],
    )
    def test_what_a_strategy_keeps_on_the_host(self, config: str, policies: dict[str, str]) -> None:
        trainer = f", strategy_args: {{strategy_name: deepspeed_train, strategy_config: {config}}}"
        text = self.text(trainer=trainer)
        spec = spec_of(text)
        assert component(spec, "actor_train")["offload"] == policies
        assert cases.offload_problems(conversion.convert("roll", text)) == []
        alone = self.text("is_offload_states: true", trainer=trainer, rollout="list(range(4,8))")
        assert all("offload" not in item for item in (*spec_of(alone)["components"], spec_of(alone)))
        dropped = {note.path for note in conversion.convert("roll", alone).notes if note.kind is NoteKind.DROPPED}
        assert {"is_offload_states"} < dropped
        assert cases.offload_problems(conversion.convert("roll", alone)) == []
