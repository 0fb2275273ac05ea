"""RLinf configurations to manifests, key by key; test_configurations.py does whole files."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_convert import conversion
from rljob_convert.notes import Note, NoteKind
from tests.unit.convert import cases
from tests.unit.convert.cases import component

TOKEN_WEIGHT = {"level": "Token", "high": 2}


def spec_of(text: str, **options: Any) -> dict[str, Any]:
    return cases.spec_of("rlinf", text, **options)


def notes(text: str, path: str) -> list[Note]:
    return cases.notes("rlinf", text, path)


class TestGroups:
    def test_runs_keep_node_ranks(self) -> None:
        text = """
cluster:
  num_nodes: 5
  component_placement: {actor: {node_group: odd, placement: 0-15}, rollout: {node_group: even, placement: all}}
  node_groups: [{label: odd, node_ranks: "1,3"}, {label: Even Nodes, node_ranks: [0, 2, 4]}, {label: even, node_ranks: "0,2,4"}]
"""
        spec = spec_of(text)
        assert [(group["name"], group["nodes"]) for group in spec["nodeGroups"]] == [
            ("even-nodes-even", 1),
            ("odd", 1),
            ("even-nodes-even-2", 1),
            ("odd-2", 1),
            ("even-nodes-even-3", 1),
        ]
        assert component(spec, "actor")["placement"] == {"nodeGroups": ["odd", "odd-2"], "ranks": "0-15"}
        plan = cases.plan(conversion.convert("rlinf", text))
        assert [process.node_rank for process in plan.component("actor").processes] == [1] * 8 + [3] * 8
        assert {process.node_rank for process in plan.component("rollout").processes} == {0, 2, 4}

    def test_several_groups_count_in_written_order(self) -> None:
        text = """
cluster:
  num_nodes: 2
  component_placement: {actor: {node_group: "b, a", placement: 6-9}, rollout: "0-3:0-7"}
  node_groups: [{label: a, node_ranks: 0}, {label: b, node_ranks: 1}]
"""
        spec = spec_of(text)
        assert component(spec, "actor")["placement"] == {"nodeGroups": ["b", "a"], "ranks": "6-9"}
        assert component(spec, "rollout")["placement"] == {"ranks": "0-3:0-7"}

    def test_one_environment_per_node(self) -> None:
        spec = spec_of((cases.FOLDER / "rlinf-heterogeneous-env.yaml").read_text())
        values = {group["name"]: group.get("env", [{}])[0].get("value") for group in spec["nodeGroups"]}
        assert values == {"train": "eth0", "train-2": "eth1", "head-2": None}
        assert [group.get("ignoreHardware") for group in spec["nodeGroups"]] == [None, None, None]

    def test_two_interpreters_on_one_node(self) -> None:
        text = (cases.FOLDER / "rlinf-overlapping.yaml").read_text()
        spec = spec_of(text.replace('    env: {node_group: franka, placement: "0-1:0-3"}\n', ""))
        assert component(spec, "reward")["pythonInterpreter"] == "/opt/judge/bin/python"
        assert all("pythonInterpreter" not in group for group in spec["nodeGroups"])

    def test_robots_of_a_node_that_trains_are_placed_by_node(self) -> None:
        plan = cases.plan(cases.converted(cases.FOLDER / "rlinf-overlapping.yaml"))
        assert [process.node_rank for process in plan.component("env").processes] == [2, 2, 3, 3]

    def test_robots(self) -> None:
        plan = cases.plan(cases.converted(cases.FOLDER / "rlinf-doc-heterogeneous.yaml"))
        assert [process.node_rank for process in plan.component("env").processes] == [16, 17]
        assert [item.world_size for item in plan.components] == [64, 64, 2, 400]

    def test_devices_per_node_can_be_given(self) -> None:
        text = "cluster: {num_nodes: 2, component_placement: {'actor,rollout': all}}"
        assert spec_of(text, devices_per_node=4)["nodeGroups"] == [{"name": "nodes", "nodes": 2, "devicesPerNode": 4}]
        assert notes(text, "cluster.devices_per_node")[0].kind is NoteKind.ASSUMED

    def test_processes_that_their_units_do_not_divide_are_spread(self) -> None:
        plan = cases.plan(cases.converted(cases.FOLDER / "rlinf-doc-groups.yaml"))
        agent = plan.component("agent")
        assert [sum(process.node_rank == node for process in agent.processes) for node in range(4)] == [101, 100, 156, 155]

    @pytest.mark.parametrize("written", ["7", "1_0", "x", "0-9", "3-1", "-1"])
    def test_node_ranks_that_do_not_exist_are_noted(self, written: str) -> None:
        text = f"cluster: {{num_nodes: 2, component_placement: {{actor: 0}}, node_groups: [{{label: a, node_ranks: '{written}'}}]}}"
        (note,) = notes(text, "cluster.node_groups[0].node_ranks")
        assert note.kind is NoteKind.UNKNOWN


class TestRoles:
    def test_inference_without_kl_is_dropped_with_the_reason(self) -> None:
        text = "cluster: {num_nodes: 1, component_placement: {actor: 0-1, rollout: 2-5, inference: 6-7}}"
        assert [item["name"] for item in spec_of(text)["components"]] == ["actor", "rollout", "reward"]
        (note,) = notes(text, "cluster.component_placement.inference")
        assert note.kind is NoteKind.DROPPED
        assert "log-probs" in note.why

    def test_inference_with_kl_is_the_reference(self) -> None:
        text = "cluster: {num_nodes: 1, component_placement: {actor: 0-1, rollout: 2-5, inference: 6-7}}\nalgorithm: {kl_beta: 0.1}"
        assert component(spec_of(text), "inference")["role"] == "Reference"

    def test_rewards_on_devices_become_cpu_workers(self) -> None:
        text = "cluster: {num_nodes: 1, component_placement: {'actor,rollout': 0-7, reward: '0-3:0-7'}}"
        assert component(spec_of(text), "reward")["placement"] == {"workers": 8}

    def test_offload(self) -> None:
        spec = spec_of((cases.FOLDER / "rlinf-doc-collocated.yaml").read_text())
        assert component(spec, "actor")["offload"] == {"optimizer": "Always", "weight": "Always", "grad": "Always"}
        assert spec["offload"] == {"residency": "Switching"}

    def test_offload_where_only_some_share(self) -> None:
        """The engines have devices of their own, and so nothing to offload for."""
        text = (
            "cluster: {num_nodes: 1, component_placement: {actor: 0-1, rollout: 2-5, inference: 0-1}}\nalgorithm: {kl_beta: 0.1}\n"
            "actor: {enable_offload: true, offload_grad: false}\nrollout: {enable_offload: true}"
        )
        spec = spec_of(text)
        assert component(spec, "actor")["offload"] == {"optimizer": "Always", "weight": "Always", "grad": "Never"}
        assert "offload" not in component(spec, "rollout")
        assert [note.kind for note in notes(text, "rollout.enable_offload")] == [NoteKind.DROPPED]
        assert cases.offload_problems(conversion.convert("rlinf", text)) == []

    @pytest.mark.parametrize(
        ("placement", "kind"), [("{actor: 0-1, rollout: 2-5}", NoteKind.DROPPED), ("{'actor,rollout': 0-3}", NoteKind.DIFFERENT)]
    )
    def test_offload_that_is_off_or_for_nobody(self, placement: str, kind: NoteKind) -> None:
        flags = "actor: {offload_weight: false, offload_optimizer: false}\nrollout: {enable_offload: false}"
        text = f"cluster: {{num_nodes: 1, component_placement: {placement}}}\n{flags}"
        spec = spec_of(text)
        assert spec.get("offload", {}).get("residency", "Resident") == "Resident"
        assert all("offload" not in item for item in spec["components"])
        assert [note.kind for note in notes(text, "actor.offload_weight")] == [kind]
        assert cases.offload_problems(conversion.convert("rlinf", text)) == []

    def test_collocated_with_offload_of_both(self) -> None:
        text = (
            "cluster: {num_nodes: 1, component_placement: {'actor,rollout': 0-3}}\n"
            "actor: {offload_weight: true, offload_optimizer: true, offload_grad: true}\nrollout: {enable_offload: true}"
        )
        spec = spec_of(text)
        assert component(spec, "rollout")["offload"] == {"weight": "Always", "kvCache": "Always"}
        assert spec["offload"] == {"residency": "Switching"}
        assert cases.offload_problems(conversion.convert("rlinf", text)) == []

    @pytest.mark.parametrize(
        ("rule", "advantage", "reward"),
        [
            ("adv_type: reinpp_baseline, gamma: 0.9", {"estimator": "ReinforcePlusPlus"}, {"center": "Group"}),
            ("adv_type: rloo, normalize_advantages: true, gamma: 1.0", {"estimator": "RLOO", "whiten": True}, None),
            ("adv_type: raw, gamma: 0.9, gae_lambda: 0.9", {"estimator": "Reinforce"}, None),
            ("adv_type: grpo, gamma: 0.9, gae_lambda: 0.9", {"estimator": "GRPO"}, None),
            ("adv_type: grpo, normalize_advantages: true", {"estimator": "GRPO", "whiten": True}, None),
            ("adv_type: reinpp, normalize_advantages: true", {"estimator": "ReinforcePlusPlus"}, None),
            ("adv_type: reinpp, use_reinpp_baseline: true", {"estimator": "ReinforcePlusPlus"}, {"center": "Group"}),
            ("adv_type: grpo, use_reinpp_baseline: true", {"estimator": "GRPO"}, None),
        ],
    )
    def test_advantages(self, rule: str, advantage: dict[str, Any], reward: dict[str, Any] | None) -> None:
        text = f"algorithm: {{{rule}, kl_beta: 0.1, kl_penalty_type: abs}}"
        algorithm = spec_of(text)["algorithm"]
        assert (algorithm["advantage"], algorithm.get("reward")) == (advantage, reward)
        assert algorithm["kl"] == {"coefficient": 0.1, "estimator": "Abs"}

    @pytest.mark.parametrize(
        ("rule", "kl"),
        [
            ("adv_type: reinpp, reinpp_kl_beta: 0.1, kl_penalty_type: k1", {"coefficient": 0.1, "estimator": "K1", "placement": "Reward"}),
            ("adv_type: reinpp, reinpp_kl_beta: 0.1, kl_beta: 0.2", {"coefficient": 0.2}),
            ("adv_type: grpo, reinpp_kl_beta: 0.1", None),
        ],
    )
    def test_the_penalty_of_reinforce_plus_plus(self, rule: str, kl: dict[str, Any] | None) -> None:
        text = f"algorithm: {{{rule}}}"
        assert spec_of(text)["algorithm"].get("kl") == kl
        assert bool(notes(text, "algorithm.reinpp_kl_beta")) == (kl is None or "placement" not in kl)

    def test_a_clip_of_values_needs_several_updates(self) -> None:
        text = "algorithm: {adv_type: gae, value_clip: 0.2}"
        assert "critic" not in spec_of(text)["algorithm"]
        assert notes(text, "algorithm.value_clip")[0].kind is NoteKind.DROPPED

    @pytest.mark.parametrize(("schedule", "warmup"), [("linear", 9), ("constant", 10)])
    def test_a_schedule_that_falls_keeps_a_step(self, schedule: str, warmup: int) -> None:
        text = f"runner: {{max_steps: 10}}\nactor: {{optim: {{lr_scheduler: {schedule}, lr_warmup_steps: 50}}}}"
        assert spec_of(text)["training"]["warmupSteps"] == warmup

    def test_gae_with_and_without_its_critic(self) -> None:
        rule = "algorithm: {adv_type: gae, gae_lambda: 0.9, value_clip: 0.2, n_minibatches: 2}\nactor: {optim: {value_lr: 0.001}}"
        algorithm = spec_of(rule)["algorithm"]
        assert algorithm["advantage"] == {"estimator": "GAE", "lambda": 0.9}
        assert algorithm["critic"] == {"learningRate": 0.001, "valueClip": 0.2}
        assert "places none" in notes(rule, "algorithm.adv_type")[0].why
        placed = f"{rule}\ncluster: {{num_nodes: 1, component_placement: {{actor: 0-1, rollout: 2-3, 'critic,reward': 4-5}}}}"
        assert notes(placed, "algorithm.adv_type") == []
        assert conversion.problems(conversion.convert("rlinf", placed)) == ()

    def test_validation_that_upstream_does_not_run_is_not_invented(self) -> None:
        questions = "cluster: {num_nodes: 1}\ndata: {val_data_paths: [a.jsonl]}"
        every = f"{questions}\nrunner: {{val_check_interval: 5, task_type: reasoning}}"
        assert "validate nothing" in notes(every, "runner.val_check_interval")[0].why
        assert notes(every, "data.val_data_paths")[0].kind is NoteKind.DROPPED
        for text in (every, questions, f"{questions}\nrunner: {{val_check_interval: -1}}", "runner: {val_check_interval: 5}"):
            spec = spec_of(text)
            assert "validation" not in spec
            assert "validation" not in spec["data"]

    def test_references_with_resolvers(self) -> None:
        spec = spec_of((cases.FOLDER / "rlinf-reasoning.yaml").read_text())
        assert spec["rollout"]["maxResponseTokens"] == 28672 - 1024
        assert spec["model"]["dtype"] == "bfloat16"

    def test_the_critic_has_its_own_optimizer(self) -> None:
        text = """
cluster: {num_nodes: 1, component_placement: {actor: 0-1, rollout: 2-3, 'critic,reward': 4-5}}
algorithm: {adv_type: gae, value_cliprange: 0.5, critic_warmup_steps: 3, n_minibatches: 2}
critic:
  training_backend: megatron
  optim: {lr: 1.0e-5, adam_beta1: 0.8, adam_beta2: 0.99, adam_eps: 1.0e-7, weight_decay: 0.01, clip_grad: 2.0, min_lr: 5.0e-6}
  lr_sched: {lr_decay_style: linear, lr_warmup_iters: 4, min_lr: 1.0e-6}
"""
        assert spec_of(text)["algorithm"]["critic"] == {
            "learningRate": 1e-5,
            "minLearningRate": 1e-6,
            "schedule": "Linear",
            "learningRateWarmupSteps": 2,
            "beta1": 0.8,
            "beta2": 0.99,
            "epsilon": 1e-7,
            "weightDecay": 0.01,
            "maxGradNorm": 2.0,
            "valueClip": 0.5,
            "warmupSteps": 3,
        }
        assert "reads critic.lr_sched alone" in notes(text, "critic.optim.min_lr")[0].why
        assert "a step has 2" in notes(text, "critic.lr_sched.lr_warmup_iters")[0].why

    @pytest.mark.parametrize(
        ("algorithm", "expected"),
        [
            ("recompute_logprobs: true, n_minibatches: 4", {"proximal": "Recompute"}),
            ("recompute_logprobs: true", None),
            ("recompute_logprobs: false, n_minibatches: 4", None),
            (
                "importance_sampling_fix: true, importance_sampling_clip: 2",
                {"proximal": "Recompute", "weight": {"level": "Token", "high": 2}},
            ),
            ("importance_sampling_fix: false, importance_sampling_clip: 2", None),
        ],
    )
    def test_what_the_ratio_compares_with(self, algorithm: str, expected: dict[str, Any] | None) -> None:
        text = f"algorithm: {{{algorithm}}}\ndata: {{rollout_batch_size: 32}}"
        assert spec_of(text)["algorithm"].get("offPolicy") == expected

    def test_a_ratio_that_is_one_upstream_is_said(self) -> None:
        assert "ratio is 1" in notes("algorithm: {recompute_logprobs: true}", "algorithm.recompute_logprobs")[0].why

    def test_groups_of_equal_rewards_are_left_out_and_choices_within_groups_are_noted(self) -> None:
        chosen = "{reject_equal_reward: true, down_sample_to_n: 4, roc_error_ratio: true, roc_answer_format: false}"
        text = f"algorithm: {{group_size: 8, down_sampling: {{do_down_sampling: true, down_sampling_config: {chosen}}}}}"
        assert spec_of(text)["rollout"]["groupFilter"] == {"minStd": 0.0}
        where = "algorithm.down_sampling.down_sampling_config"
        assert notes(text, f"{where}.down_sample_to_n")[0].remedy.startswith("write rollout.samplesPerPrompt: 4")
        assert notes(text, f"{where}.reject_equal_reward")[0].kind is NoteKind.DIFFERENT
        assert notes(text, f"{where}.roc_error_ratio")
        assert not notes(text, f"{where}.roc_answer_format")
        off = text.replace("do_down_sampling: true", "do_down_sampling: false")
        assert "groupFilter" not in spec_of(off)["rollout"]
        assert notes(off, where)[0].why == "do_down_sampling is off"

    @pytest.mark.parametrize(
        ("scales", "words"),
        [
            ("[group_level, agent_level, turn_level]", "write SeqMeanTokenMean: the same where"),
            ("[group_level, agent_level]", "write SeqMeanTokenMean: episodes weigh alike"),
            ("[group_level]", "check training.learningRate"),
        ],
    )
    def test_scales_of_losses_have_a_remedy_each(self, scales: str, words: str) -> None:
        assert words in notes(f"algorithm: {{loss_scales: {scales}}}", "algorithm.loss_scales")[0].remedy

    @pytest.mark.parametrize(("bounds", "noted"), [("clip_ratio_low: 0.2, clip_ratio_high: 0.28", 1), ("clip_ratio_high: 0.28", 0)])
    def test_a_clip_range_that_two_bounds_replace_is_noted(self, bounds: str, noted: int) -> None:
        assert len(notes(f"algorithm: {{ratio_clip_eps: 0.2, {bounds}}}", "algorithm.ratio_clip_eps")) == noted

    def test_stop_tokens_and_a_top_k_that_cuts_nothing(self) -> None:
        rollout = spec_of("algorithm: {sampling_params: {stop_token_ids: [5, 7], top_k: 1000000}}")["rollout"]
        assert rollout["stopTokenIds"] == [5, 7]
        assert "topK" not in rollout

    @pytest.mark.parametrize(("backend", "expected"), [("megatron", 2e-6), ("fsdp", 1e-6)])
    def test_each_backend_reads_the_end_of_its_schedule_elsewhere(self, backend: str, expected: float) -> None:
        sections = "optim: {lr: 1.0e-5, min_lr: 1.0e-6, lr_scheduler: cosine}, lr_sched: {lr_decay_style: cosine, min_lr: 2.0e-6}"
        assert spec_of(f"actor: {{training_backend: {backend}, {sections}}}")["training"]["minLearningRate"] == expected

    def test_a_share_of_the_peak_counts_before_the_end_of_the_schedule(self) -> None:
        text = "actor: {training_backend: fsdp, optim: {lr: 1.0e-5, lr_scheduler: cosine, min_lr: 1.0e-6, min_lr_rate: 0.5}}"
        assert spec_of(text)["training"]["minLearningRate"] == pytest.approx(5e-6)
        (note,) = notes(text, "actor.optim.min_lr")
        assert note.why == "min_lr_rate counts"

    @pytest.mark.parametrize("word", ["actor: {model: {precision: bf16}}", ""])
    def test_an_engine_has_its_own_dtype(self, word: str) -> None:
        spec = spec_of(f"{word}\ncluster: {{component_placement: {{rollout: all}}}}\nrollout: {{model: {{precision: fp16}}}}")
        assert component(spec, "rollout")["engine"]["dtype"] == "float16"

    def test_float16_training_takes_its_engines_along(self) -> None:
        text = "cluster: {component_placement: {rollout: all}}\nactor: {model: {precision: fp16}}\n"
        text += "rollout: {model: {precision: '${actor.model.precision}'}}"
        spec = spec_of(text)
        assert spec["model"]["dtype"] == "bfloat16"
        assert "dtype" not in component(spec, "rollout")["engine"]
        assert "loss scaling" in notes(text, "actor.model.precision")[0].why

    @pytest.mark.parametrize("switch", ["runner: {task_type: reasoning_eval}", "eval: true\nactor: {}", "runner: {only_eval: true}"])
    def test_an_evaluation_becomes_one_validation(self, switch: str) -> None:
        spec = spec_of(f"{switch}\ncluster: {{num_nodes: 1}}\ndata: {{val_data_paths: [a.jsonl, b.parquet]}}\nalgorithm: {{group_size: 4}}")
        assert spec["training"] == {"steps": 0}
        assert {item["role"] for item in spec["components"]} == {"Rollout", "Reward"}
        assert not spec.keys() & {"algorithm", "offload", "checkpoint"}
        assert "train" not in spec["data"]
        lines, columns = spec["data"]["validation"]
        assert (lines["type"], lines["jsonl"]["path"]) == ("JSONL", "a.jsonl")
        assert (columns["type"], columns["parquet"]["path"]) == ("Parquet", "b.parquet")
        assert spec["validation"]["samplesPerPrompt"] == 4

    def test_an_evaluation_samples_as_the_file_says_and_greedy_answers_need_no_bounds(self) -> None:
        text = "runner: {only_eval: true}\nalgorithm: {sampling_params: {temperature: 0.6, top_p: 0.95, top_k: 20}}"
        sampled = spec_of(text)["validation"]
        assert {key: sampled[key] for key in ("temperature", "topP", "topK")} == {"temperature": 0.6, "topP": 0.95, "topK": 20}
        greedy = text.replace("0.6", "0.0")
        assert not spec_of(greedy)["validation"].keys() & {"topP", "topK"}
        for key in ("top_p", "top_k"):
            (note,) = notes(greedy, f"algorithm.sampling_params.{key}")
            assert "greedy" in note.why
        switched = text.replace("{temperature", "{do_sample: false, temperature")
        assert spec_of(switched)["validation"] == spec_of(greedy)["validation"]
        assert not notes(switched, "algorithm.sampling_params.do_sample")

    @pytest.mark.parametrize("section", ["agentloop: {max_turns: 2}", "tools: {online: false}"])
    def test_tools_and_agents_are_never_left_out(self, section: str) -> None:
        assert spec_of(f"runner: {{task_type: reasoning}}\n{section}")["pipeline"] == "Agentic"

    def test_devices_that_share_sequences_are_one_data_parallel_process(self) -> None:
        text = "cluster: {num_nodes: 8, component_placement: {actor: 24-63, 'rollout,reward': 0-15}}\n"
        text += "algorithm: {group_size: 16, n_minibatches: 4}\ndata: {rollout_batch_size: 512}\nactor: {model: {context_parallel_size: 8}}"
        assert spec_of(text)["training"]["contextParallelSize"] == 8
        assert "5 processes do not divide 512 * 16" in notes(text, "data.rollout_batch_size")[0].why
        assert not notes(text, "actor.model.context_parallel_size")

    @pytest.mark.parametrize(("tensor", "expected"), [(2, True), (1, None)])
    def test_tokens_are_divided_where_layers_are(self, tensor: int, expected: bool | None) -> None:
        text = "cluster: {num_nodes: 8, component_placement: {actor: 24-63, 'rollout,reward': 0-15}}\n"
        text += f"actor: {{model: {{tensor_model_parallel_size: {tensor}, sequence_parallel: true}}}}"
        assert spec_of(text)["training"].get("sequenceParallel") is expected
        assert not notes(text, "actor.model.sequence_parallel")

    @pytest.mark.parametrize(("size", "expected"), [(1, None), (4, 4), (3, None)])
    def test_experts_are_divided_where_the_trainers_processes_are(self, size: int, expected: int | None) -> None:
        text = "cluster: {num_nodes: 8, component_placement: {actor: 24-63, 'rollout,reward': 0-15}}\n"
        text += f"actor: {{model: {{expert_model_parallel_size: {size}, tensor_model_parallel_size: 2}}}}"
        training = spec_of(text)["training"]
        assert training.get("expertParallelSize") == expected
        assert training["tensorParallelSize"] == 2
        said = [note.why for note in notes(text, "actor.model.expert_model_parallel_size")]
        assert said == (["does not divide the 40 training processes, which shard experts by FSDP2"] if size == 3 else [])

    def test_the_critic_has_its_own_parallel_sizes(self) -> None:
        text = (
            "cluster: {num_nodes: 1, component_placement: {actor: 0-1, rollout: 2-3, 'critic,reward': 4-7}}\nalgorithm: {adv_type: gae}\n"
        )
        text += "critic: {model: {context_parallel_size: 2, expert_model_parallel_size: 4, tensor_model_parallel_size: 2}}"
        critic = component(spec_of(text), "critic")
        assert (critic["tensorParallelSize"], critic["contextParallelSize"], critic["expertParallelSize"]) == (2, 2, 4)
        assert not [note.path for note in conversion.convert("rlinf", text).notes if note.path.startswith("critic.model")]

    def test_prompts_that_the_trainers_processes_divide(self) -> None:
        text = "cluster: {num_nodes: 8, component_placement: {actor: 24-63, 'rollout,reward': 0-15}}\n"
        text += "algorithm: {group_size: 16, n_minibatches: 4}\ndata: {rollout_batch_size: 512}"
        assert spec_of(text)["rollout"]["promptsPerStep"] == 500
        assert "40 processes do not divide 512 * 16" in notes(text, "data.rollout_batch_size")[0].why

    @pytest.mark.parametrize(
        ("schedule", "warmup", "said"),
        [
            (
                "training_backend: megatron, lr_sched: {lr_warmup_fraction: 0.01, lr_decay_iters: 10, lr_warmup_iters: 0}",
                0,
                "of the 10 optimizer updates",
            ),
            (
                "training_backend: megatron, lr_sched: {lr_warmup_fraction: 0.5, lr_decay_iters: 100, lr_warmup_iters: 7}",
                13,
                "becomes 13 of 20 steps",
            ),
            ("training_backend: megatron, lr_sched: {lr_warmup_fraction: 0.0001}", 3, "of the 100,000 optimizer updates"),
            ("training_backend: megatron, lr_sched: {lr_warmup_iters: 6}, optim: {lr_warmup_steps: 9}", 2, "optimizer updates"),
            ("training_backend: fsdp, lr_sched: {lr_warmup_fraction: 0.5}, optim: {lr_warmup_steps: 9}", 3, "a step has 4"),
            ("training_backend: fsdp, optim: {lr_warmup_steps_ratio: 0.1, total_training_steps: 60}", 2, "of the 60 optimizer"),
            ("training_backend: fsdp, optim: {lr_warmup_steps_ratio: 0.1}", 0, "of the 0 optimizer"),
            ("training_backend: fsdp, lr_sched_sync_with_optim: false, optim: {lr_warmup_steps: 9}", 9, None),
            ("training_backend: fsdp, lr_sched_sync_with_optim: true, optim: {lr_warmup_steps: 9}", 3, "a step has 4 in RLinf"),
            (
                "training_backend: fsdp, lr_sched_sync_with_optim: false, optim: {lr_warmup_steps_ratio: 0.2, total_training_steps: 20}",
                4,
                "is 4 of the 20 steps over",
            ),
            ("training_backend: megatron, lr_sched_sync_with_optim: false, lr_sched: {lr_warmup_iters: 9}", 3, "a step has 4"),
            ("optim: {lr_warmup_steps_ratio: 0.1}", 2, "of the 80 optimizer"),
        ],
    )
    def test_warm_up_counts_updates_of_the_trainers_own_keys(self, schedule: str, warmup: int, said: str | None) -> None:
        text = f"algorithm: {{n_minibatches: 4}}\nrunner: {{max_steps: 20}}\nactor: {{{schedule}}}"
        assert spec_of(text)["training"]["warmupSteps"] == warmup
        found = [
            note.why for note in conversion.convert("rlinf", text).notes if (note.kind, "warmup" in note.path) == (NoteKind.DIFFERENT, True)
        ]
        assert [why for why in found if said and said in why] == found
        assert bool(found) is (said is not None)

    def test_keys_of_the_other_trainer_are_said_to_be_unread(self) -> None:
        text = "actor: {training_backend: fsdp, lr_sched: {lr_decay_style: linear, lr_warmup_fraction: 0.5, min_lr: 1.0e-7}}"
        assert not {"schedule", "warmupSteps", "minLearningRate"} & spec_of(text)["training"].keys()
        for key in ("lr_decay_style", "lr_warmup_fraction", "min_lr"):
            assert "reads actor.optim alone" in notes(text, f"actor.lr_sched.{key}")[0].why

    @pytest.mark.parametrize(("end", "kind"), [(80, None), (50, NoteKind.DIFFERENT), (None, NoteKind.ASSUMED)])
    def test_a_schedule_that_ends_elsewhere_is_said(self, end: int | None, kind: NoteKind | None) -> None:
        given = "" if end is None else f", lr_decay_iters: {end}"
        text = "algorithm: {n_minibatches: 4}\nrunner: {max_steps: 20}\n"
        text += f"actor: {{training_backend: megatron, lr_sched: {{lr_decay_style: linear{given}}}}}"
        assert [note.kind for note in notes(text, "actor.lr_sched.lr_decay_iters")] == ([] if kind is None else [kind])

    @pytest.mark.parametrize(("end", "said"), [(20, []), (80, ["the rate falls over all 20 steps of the job, instead of 80"])])
    def test_a_schedule_that_counts_steps_ends_with_the_steps(self, end: int, said: list[str]) -> None:
        text = "algorithm: {n_minibatches: 4}\nrunner: {max_steps: 20}\nactor: {training_backend: fsdp, lr_sched_sync_with_optim: false, "
        text += f"optim: {{lr_scheduler: cosine, total_training_steps: {end}}}}}"
        assert [note.why for note in notes(text, "actor.optim.total_training_steps")] == said
        assert notes(text, "actor.lr_sched_sync_with_optim") == []

    @pytest.mark.parametrize(("backend", "noted"), [("megatron", 1), ("fsdp", 0)])
    def test_what_the_schedule_counts_is_a_switch_of_fsdp(self, backend: str, noted: int) -> None:
        text = f"actor: {{training_backend: {backend}, lr_sched_sync_with_optim: false}}"
        assert ["does not read it" in note.why for note in notes(text, "actor.lr_sched_sync_with_optim")] == [True] * noted

    @pytest.mark.parametrize(("schedule", "kinds"), [("constant", []), ("cosine", [NoteKind.ASSUMED])])
    def test_no_end_of_a_schedule_is_written_as_zero(self, schedule: str, kinds: list[NoteKind]) -> None:
        text = f"actor: {{training_backend: fsdp, optim: {{lr_scheduler: {schedule}, total_training_steps: 0}}}}"
        assert [note.kind for note in notes(text, "actor.optim.total_training_steps")] == kinds
        unread = text.replace("fsdp", "megatron").replace("optim:", "lr_sched:").replace("lr_scheduler", "lr_decay_style")
        unread = unread.replace("total_training_steps", "lr_decay_iters")
        assert notes(unread, "actor.lr_sched.lr_decay_iters")[0].kind is NoteKind.UNKNOWN

    def test_the_schedule_counts_the_updates_that_rlinf_makes(self) -> None:
        """Of 8 updates of 4 prompts * 8 responses RLJob makes 4, which divide the prompts."""
        text = "algorithm: {n_minibatches: 8, group_size: 8, adv_type: gae}\ndata: {rollout_batch_size: 4}\nrunner: {max_steps: 20}\n"
        text += "actor: {training_backend: megatron, lr_sched: {lr_warmup_iters: 16, lr_decay_style: linear, lr_decay_iters: 160}}\n"
        text += "critic: {training_backend: megatron, optim: {lr: 1.0e-5}, lr_sched: {lr_warmup_iters: 24}}"
        spec = spec_of(text)
        assert spec["training"]["miniBatches"] == 4
        assert spec["training"]["warmupSteps"] == 2
        assert spec["algorithm"]["critic"]["learningRateWarmupSteps"] == 3
        assert notes(text, "actor.lr_sched.lr_decay_iters") == []

    def test_an_engine_without_memory_is_no_engine(self) -> None:
        text = "cluster: {component_placement: {rollout: all}}\nrollout: {gpu_memory_utilization: 0}"
        assert "memoryFraction" not in component(spec_of(text), "rollout")["engine"]
        assert notes(text, "rollout.gpu_memory_utilization")[0].kind is NoteKind.UNKNOWN

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ("algorithm: {loss_agg_func: token-mean, training_batch_size_per_gpu: 1}", "SeqMeanTokenMean"),
            ("algorithm: {loss_agg_func: token-mean}", "SeqMeanTokenMean"),
            ("algorithm: {loss_agg_func: token-mean, training_batch_size_per_gpu: 4}", "TokenMean"),
            ("algorithm: {loss_agg_func: token-mean}\nrunner: {enable_dynamic_batch_size: true}", "TokenMean"),
            ("algorithm: {loss_agg_func: token-mean, use_valid_token_scale: true}", "TokenMean"),
            ("algorithm: {loss_agg_func: token-mean, use_valid_token_scale: true}\nactor: {training_backend: fsdp}", "SeqMeanTokenMean"),
            ("algorithm: {loss_agg_func: seq-mean-token-sum}", "SeqMeanTokenSum"),
        ],
    )
    def test_a_mean_over_tokens_is_one_of_micro_batches(self, settings: str, expected: str) -> None:
        assert spec_of(settings)["algorithm"]["policyLoss"]["aggregation"] == expected
        exact = "use_valid_token_scale: true}" in settings and "fsdp" not in settings
        assert bool(notes(settings, "algorithm.loss_agg_func")) is not (exact or expected == "SeqMeanTokenSum")

    def test_a_bonus_without_its_switch_is_reported(self) -> None:
        text = "algorithm: {entropy_bonus: 0.01}"
        assert spec_of(text)["algorithm"]["entropyCoefficient"] == 0.01
        assert [note.kind for note in notes(text, "algorithm.calculate_entropy")] == [NoteKind.ASSUMED]
        assert notes("algorithm: {entropy_bonus: 0}", "algorithm.calculate_entropy") == []

    @pytest.mark.parametrize(("measured", "expected"), [("true", 0.01), ("false", None), ("null", None)])
    def test_an_entropy_bonus_needs_the_entropy(self, measured: str, expected: float | None) -> None:
        text = f"algorithm: {{entropy_bonus: 0.01, calculate_entropy: {measured}}}"
        assert spec_of(text)["algorithm"].get("entropyCoefficient") == expected
        assert bool(notes(text, "algorithm.entropy_bonus")) is (expected is None)

    def test_defaults_that_are_not_rljobs_are_written_out(self) -> None:
        text = "algorithm: {adv_type: gae, loss_type: actor}\ncritic: {optim: {lr: 1.0e-5}}\n"
        text += "actor: {training_backend: fsdp, optim: {lr: 1.0e-6}}"
        spec = spec_of(text)
        assert spec["algorithm"]["advantage"]["lambda"] == 1.0
        assert (spec["training"]["weightDecay"], spec["algorithm"]["critic"]["weightDecay"]) == (0.01, 0.01)
        assert spec["algorithm"]["policyLoss"]["dualClip"] == 3.0
        for path in ("algorithm.gae_lambda", "actor.optim.weight_decay", "critic.optim.weight_decay", "algorithm.clip_ratio_c"):
            assert notes(text, path)[0].kind is NoteKind.ASSUMED

    def test_texts_that_end_a_response(self) -> None:
        text = "algorithm: {sampling_params: {stop: ['</search>', '</answer>']}}"
        assert spec_of(text)["rollout"]["stopStrings"] == ["</search>", "</answer>"]
        assert "only served requests" in notes(text, "algorithm.sampling_params.stop")[0].why
        assert notes(f"{text}\nrollout_server: {{online_router: {{port: 1}}}}", "algorithm.sampling_params.stop") == []

    def test_the_critic_leaves_its_devices_too(self) -> None:
        text = "cluster: {num_nodes: 1, component_placement: {'actor,critic,rollout': all}}\nalgorithm: {adv_type: gae}\n"
        text += "actor: {enable_offload: true}\ncritic: {use_critic_model: true, offload_optimizer: true, offload_weight: false}"
        assert component(spec_of(text), "critic")["offload"] == {"optimizer": "Always", "weight": "Never"}
        assert [note.path for note in conversion.convert("rlinf", text).notes if note.path.startswith("critic.")] == []
        off = text.replace("use_critic_model: true", "use_critic_model: false")
        assert notes(off, "critic.use_critic_model")[0].why == "a Critic is placed"

    @pytest.mark.parametrize(
        ("counts", "turns", "noted"), [("max_assistant_turns: 5", 5, 0), ("max_turns: 2, max_assistant_turns: 5", 2, 1)]
    )
    def test_turns_of_an_agent(self, counts: str, turns: int, noted: int) -> None:
        text = f"runner: {{task_type: reasoning}}\nagentloop: {{{counts}}}"
        assert spec_of(text)["environments"][0]["maxTurns"] == turns
        assert len(notes(text, "agentloop.max_assistant_turns")) == noted

    @pytest.mark.parametrize(("mode", "noted"), [("trajectory", 0), ("turn", 1)])
    def test_advantages_of_episodes_are_what_grpo_does(self, mode: str, noted: int) -> None:
        text = f"algorithm: {{adv_type: grpo_dynamic, advantage_mode: {mode}}}"
        assert len(notes(text, "algorithm.advantage_mode")) == noted

    def test_several_files_are_sampled_alike(self) -> None:
        runner = "runner: {task_type: reasoning}\n"
        assert notes(f"{runner}data: {{train_data_paths: [a.jsonl]}}", "data.train_data_paths") == []
        assert notes(f"{runner}data: {{train_data_paths: [a.jsonl, b.jsonl]}}", "data.train_data_paths")[0].value == '"1 : 1"'

    def test_adapters_are_scaled_by_one(self) -> None:
        assert spec_of("actor: {model: {is_lora: true, lora_rank: 64}}")["model"]["lora"] == {"rank": 64, "alpha": 64.0}

    @pytest.mark.parametrize(("penalty", "noted"), [("kl", 1), ("abs", 0), ("k2", 0)])
    def test_the_order_of_arguments_matters_for_some_estimators(self, penalty: str, noted: int) -> None:
        text = f"algorithm: {{kl_beta: 0.01, kl_penalty_type: {penalty}}}\nactor: {{training_backend: fsdp}}"
        assert ["two arguments are swapped" in note.why for note in notes(text, "algorithm.kl_penalty_type")] == [True] * noted

    @pytest.mark.parametrize(("backend", "noted"), [("fsdp", 1), ("megatron", 0)])
    def test_a_penalty_that_goes_the_other_way_is_reported(self, backend: str, noted: int) -> None:
        text = f"algorithm: {{kl_beta: 0.01, kl_penalty_type: low_var_kl}}\nactor: {{training_backend: {backend}}}"
        assert len(notes(text, "algorithm.kl_penalty_type")) == noted
        assert spec_of(text)["algorithm"]["kl"] == {"coefficient": 0.01, "estimator": "K3"}

    @pytest.mark.parametrize(("bound", "expected"), [("3.0", 3.0), ("null", 0.0)])
    def test_a_dual_clip_that_is_off_stays_off(self, bound: str, expected: float) -> None:
        assert spec_of(f"algorithm: {{loss_type: actor, clip_ratio_c: {bound}}}")["algorithm"]["policyLoss"]["dualClip"] == expected


def test_keys_of_a_section_with_one_fate_share_a_note() -> None:
    text = "actor:\n  model:\n    activation: swiglu\n    add_bias_linear: false\n    normalization: rmsnorm\n  mcore_gpt: true\n"
    lines = conversion.report(conversion.convert("rlinf", text)).splitlines()
    (at,) = [index for index, line in enumerate(lines) if "keys of actor.model" in line]
    assert lines[at].startswith("  lines 3 to 5: 3 keys of actor.model: RLJob reads it")
    assert lines[at + 1] == '    activation = "swiglu", add_bias_linear = false, normalization = "rmsnorm"'
    assert any(line.startswith("  line 6: actor.mcore_gpt = true: ") for line in lines)
