"""From the spec to what each worker is constructed with. Pure: no I/O, no heavy imports.

The spec's words stop here: workers know their own small configurations only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_api.planning import environment
from rljob_api.planning.plan import Plan, PlannedComponent, PlannedProcess
from rljob_api.quantities import rounded_down
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Component, Role
from rljob_api.v1alpha1.data import DataSource, DataSourceType
from rljob_api.v1alpha1.data import PromptFormat as PromptSpec
from rljob_api.v1alpha1.data import Reward as RewardSpec
from rljob_api.v1alpha1.environments import Environment, Harness
from rljob_api.v1alpha1.learning import Rollout
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.vocabulary import HarnessSampling, PromptHistory
from rljob_runtime.cluster.protocol import Interpreter
from rljob_runtime.data.config import NO_CHAT_TEMPLATE, JsonlSource, ParquetSource, PromptFormat, ReasoningGymSource, SourceConfig
from rljob_runtime.environments.builtin import CONVERSATIONS
from rljob_runtime.environments.codec import PromptSettings
from rljob_runtime.environments.config import EnvironmentConfig, HarnessConfig, Isolation
from rljob_runtime.environments.endpoint.requests import JobSampling
from rljob_runtime.environments.turn_prompts import Memory
from rljob_runtime.job import learning_settings
from rljob_runtime.job.judge_settings import Share, asked_config
from rljob_runtime.offload.states import StateKind
from rljob_runtime.overlap.episodes import EnvironmentRules
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.training.config import PolicyConfig


def component_spec(spec: RLJobSpec, name: str) -> Component:
    """The component of that name in the spec."""
    return next(c for c in spec.components if c.name == name)


def device_type(spec: RLJobSpec, plan: Plan, process: PlannedProcess) -> DeviceType:
    """What computes on a process's devices: CPU or CUDA, never Auto."""
    return environment.device_type(environment.node_group(spec, plan, process))


def interpreter(spec: RLJobSpec, plan: Plan, component: PlannedComponent, process: PlannedProcess) -> Interpreter | None:
    """Python of a process: its component's before its node group's; None is the one that Ray runs on."""
    for index, own in enumerate(spec.components):
        if own.name == component.name and own.python_interpreter is not None:
            return Interpreter(path=own.python_interpreter, field=f"spec.components[{index}].pythonInterpreter")
    name = plan.nodes[process.node_rank].group
    for index, group in enumerate(spec.node_groups):
        if group.name == name and group.python_interpreter is not None:
            return Interpreter(path=group.python_interpreter, field=f"spec.nodeGroups[{index}].pythonInterpreter")
    return None


def node_cpus(spec: RLJobSpec) -> dict[str, int]:
    """Whole CPU cores of one node by group, at least one: as declared, else this machine's cores."""
    requests = {group.name: group.resources.cpu_request for group in spec.node_groups}
    return {name: max(1, rounded_down(cpu)) if cpu is not None else (os.cpu_count() or 1) for name, cpu in requests.items()}


def threads(spec: RLJobSpec, plan: Plan, component: PlannedComponent, process: PlannedProcess) -> int:
    """Numerics threads of a worker: as declared, else its share of the node's cores.

    Trained synchronously, components compute one after the other, so that the cores are shared among the processes of one component
    only; with overlap all processes of the node work at the same time.
    """
    declared = component_spec(spec, component.name).threads_per_worker
    if declared is not None:
        return declared
    node = plan.nodes[process.node_rank]
    together = spec.overlap.async_generation_ratio > 0 or spec.rollout.extra_prompts > 0
    at_once = plan.components if together else (component,)
    on_node = [p for c in at_once for p in c.processes if p.node_rank == node.rank and p.local_devices]
    return max(1, node_cpus(spec)[node.group] // max(len(on_node), 1))


def worker_env(spec: RLJobSpec, plan: Plan, component: PlannedComponent, process: PlannedProcess) -> dict[str, str]:
    """Environment of a worker: thread limits, over them the user's variables, over them those that describe where it runs.

    Variables that come from elsewhere, such as a Secret, are in the environment of the worker's process already: the container's, or this
    command's.
    """
    count = str(threads(spec, plan, component, process))
    env = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": ""}
    return env | environment.worker_environment(spec, plan, component, process)


def download_env(spec: RLJobSpec, plan: Plan, node_rank: int) -> dict[str, str]:
    """Environment of the process that downloads models on a node: HF_HOME, HF_TOKEN, HF_ENDPOINT, proxies.

    That of the node group, over it what components with processes there set; of several that set a variable, the first.
    """
    group = environment.group_environment(spec, plan.nodes[node_rank].group)
    there = [component_spec(spec, c.name) for c in plan.components if any(p.node_rank == node_rank for p in c.processes)]
    own = {v.name: v.value for component in reversed(there) for v in component.env if v.value is not None}
    return group | own


def policy_config(
    spec: RLJobSpec,
    *,
    role: Role,
    num_threads: int,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    offload_host_bytes: int | None = None,
    reserve: tuple[StateKind, ...] = (),
    optimizer_around_step: bool = False,
    reduces_each_micro_batch: bool = False,
    job_folder: Path | None = None,
) -> PolicyConfig:
    """Configuration of a rank of a trainer, critic, or of a reference or teacher, which train nothing.

    Parallel sizes are the component's. Host memory, ``reserve`` and ``optimizer_around_step`` come from device sharing,
    ``reduces_each_micro_batch`` from the memory estimate; a Custom loss is imported from ``job_folder`` first.
    """
    traits = TRAITS[role]
    is_policy = traits.publishes_weights
    training = spec.algorithm.critic.over(spec.training) if role is Role.CRITIC else spec.training
    return PolicyConfig(
        model_path=spec.model.path,
        trust_remote_code=spec.model.trust_remote_code,
        attn_implementation=spec.model.attention,
        dtype=spec.model.dtype.value,
        trainable=traits.is_trained,
        learning_rate=training.learning_rate,
        min_learning_rate=training.min_learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        optimizer_state_dtype=training.optimizer_state_dtype,
        weight_decay=training.weight_decay,
        warmup_steps=training.warmup_steps,
        lr_schedule=training.schedule,
        total_steps=training.steps - (learning_settings.critic_warmup_steps(spec) if is_policy else 0),
        max_grad_norm=training.max_grad_norm,
        token_budget=training.micro_batch_tokens,
        logprob_chunk_tokens=training.logprob_chunk_tokens,
        activation_checkpointing=training.activation_checkpointing,
        layer_compilation=training.layer_compilation,
        tensor_parallel_size=tensor_parallel_size,
        sequence_parallel=training.sequence_parallel and role is Role.TRAINER,
        context_parallel_size=context_parallel_size,
        expert_parallel_size=expert_parallel_size,
        lora=learning_settings.lora_config(spec) if is_policy else None,
        load_balancing=learning_settings.load_balancing_config(spec) if is_policy else None,
        router_bias_update_rate=training.router_bias_update_rate if is_policy else 0.0,
        replays_routes=is_policy and learning_settings.replays_routes(spec),
        loss=learning_settings.loss_config(spec, job_folder),
        seed=spec.seed,
        threads=num_threads,
        offload_host_bytes=offload_host_bytes,
        reserve=reserve,
        optimizer_around_step=optimizer_around_step,
        reduces_each_micro_batch=reduces_each_micro_batch,
    )


def source_config(source: DataSource, spec: RLJobSpec) -> SourceConfig:
    """One prompt source of a job."""
    if (file := source.file) is not None:
        kind = ParquetSource if source.type is DataSourceType.PARQUET else JsonlSource
        return kind(
            name=source.name,
            path=Path(file.path),
            prompt_field=file.prompt_field,
            no_messages=_no_messages(spec.data.prompt),
            answer_field=file.answer_field or None,
            tag_field=file.tag_field,
            weight=source.weight,
        )
    if source.reasoning_gym is None:
        raise ValueError(f"data source {source.name} lacks the settings of its type {source.type}; validation lets none through")
    task = source.reasoning_gym
    return ReasoningGymSource(name=source.name, task=task.task, params=task.parameters, size=task.size, weight=source.weight)


def _no_messages(prompt: PromptSpec) -> str | None:
    """Why prompts of a job cannot be conversations; None: they can."""
    if not prompt.chat_template:
        return NO_CHAT_TEMPLATE
    if prompt.template != PromptSpec.model_fields["template"].default:
        return "has no place for data.prompt.template: remove the template"
    return None


def prompt_format(spec: RLJobSpec) -> PromptFormat:
    """How questions become prompts."""
    prompt = spec.data.prompt
    return PromptFormat(
        prompt_template=prompt.template,
        chat_template=prompt.chat_template,
        system_prompt=prompt.system or None,
        template_parameters=prompt.template_parameters,
    )


def reward_config(reward: RewardSpec, share: Share) -> RewardConfig:
    """One reward, as the reward process with this share of the judges' limits computes it."""
    return RewardConfig(
        name=reward.name,
        type=reward.type,
        weight=reward.weight,
        timeout_s=reward.timeout_seconds,
        pass_threshold=reward.pass_threshold,
        extraction=reward.extraction,
        function=reward.function,
        params=reward.parameters,
        judge=None if reward.asked is None else asked_config(reward.asked, share),
        sources=reward.sources,
        on_error=_score_or_none(reward.on_error),
        on_timeout=_score_or_none(0.0 if reward.on_timeout is None else reward.on_timeout),
        network=reward.network,
        processes=reward.processes,
        read_paths=reward.read_paths,
        memory_bytes=reward.memory_bytes,
        disk_bytes=reward.disk_bytes,
    )


def environment_config(spec: RLJobSpec, environment: Environment, data_folder: Path) -> EnvironmentConfig:
    """One environment; an episode has as many tokens as engines have room for. Relative paths of its files are below ``data_folder``."""
    prompt, rollout = environment.prompt, spec.rollout
    return EnvironmentConfig(
        name=environment.name,
        type=environment.type,
        parameters=_with_paths(environment, data_folder),
        prompt=PromptSettings(
            chat_template=prompt.chat_template,
            system=prompt.system,
            instruction=prompt.instruction,
            turn=prompt.turn,
            memory=Memory(turns=prompt.memory_turns, kind=prompt.memory) if prompt.history is PromptHistory.TURN else None,
        ),
        max_turns=environment.max_turns,
        max_tokens_per_turn=environment.max_tokens_per_turn or rollout.max_response_tokens,
        max_episode_tokens=rollout.max_prompt_tokens + rollout.max_response_tokens,
        step_timeout_s=environment.step_timeout_seconds,
        episode_timeout_s=environment.episode_timeout_seconds,
        format_penalty=environment.rewards.format_penalty,
        isolation=Isolation(
            network=environment.network,
            processes=environment.processes,
            read_paths=environment.read_paths,
            memory_bytes=environment.memory_bytes,
            disk_bytes=environment.disk_bytes,
            max_processes=environment.max_processes,
            episodes_per_process=environment.episodes_per_process,
        ),
        harness=None if environment.harness is None else _harness_config(environment.harness, rollout, data_folder),
    )


def _harness_config(harness: Harness, rollout: Rollout, folder: Path) -> HarnessConfig:
    """A program; relative paths are below ``folder``, whatever a worker's working folder is."""
    return HarnessConfig(
        command=harness.command,
        working_folder=None if harness.working_folder is None else folder / harness.working_folder,
        variables={variable.name: variable.value or "" for variable in harness.env},
        tasks=None if harness.tasks is None else folder / harness.tasks,
        reward=harness.reward,
        sampling=JobSampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k or 0,
            min_p=rollout.min_p,
            replaces=harness.sampling is HarnessSampling.JOB,
        ),
    )


def _with_paths(environment: Environment, folder: Path) -> Mapping[str, Any]:
    """Parameters whose paths hold in any process."""
    parameters = dict(environment.parameters)
    if environment.type not in CONVERSATIONS:
        return parameters
    if parameters.get("path") is not None:
        parameters["path"] = str(folder / parameters["path"])
    if "tools" in parameters:
        parameters["tools"] = [
            tool | {"corpus": str(folder / tool["corpus"])} if tool.get("corpus") else tool for tool in parameters["tools"]
        ]
    return parameters


def environment_rules(environment: Environment, stop_token_ids: tuple[int, ...]) -> EnvironmentRules:
    """What the driver needs to know of an environment."""
    return EnvironmentRules(
        stop_token_ids=stop_token_ids,
        on_error=_score_or_none(environment.rewards.on_error),
        own_prompts=environment.prompt.history is PromptHistory.TURN,
    )


_REWARD_LIMITS = {"timeout_seconds", "memory_bytes", "disk_bytes"}
_ENVIRONMENT_LIMITS = {"step_timeout_seconds", "episode_timeout_seconds", "max_processes", "validation_share"}
_ROLLOUT_OPERATION = {"stall_timeout_seconds", "max_engine_restarts", "standby_processes"}
"""Fields that a resumed run may have changed."""


def _score_or_none(value: float | str) -> float | None:
    return None if isinstance(value, str) else value


def devices_in_words(plan: Plan) -> str:
    """Who runs where, in one line: ``actor_train 0 · actor_infer 1 · reward 2 processes``."""
    words = []
    for component in plan.components:
        devices = component.devices
        words.append(f"{component.name} {_ranges(devices)}" if devices else f"{component.name} {component.world_size} processes")
    return " · ".join(words)


def spec_fingerprint(spec: RLJobSpec) -> dict[str, str]:
    """By section: changes when something changes that a resumed run must not see changed; steps, limits and validation may.

    Defaults are left out, so that a new field of a later version changes nothing.
    """
    trainer = [c.model_dump(mode="json", exclude_defaults=True) for c in spec.components if c.role is Role.TRAINER]
    parts: dict[str, object] = {
        "model": spec.model.model_dump(mode="json", exclude_defaults=True),
        "data": spec.data.model_dump(mode="json", exclude_defaults=True, exclude={"validation"}),
        "rewards": [r.model_dump(mode="json", exclude_defaults=True, exclude=_REWARD_LIMITS) for r in spec.rewards],
        "rollout": spec.rollout.model_dump(mode="json", exclude_defaults=True, exclude=_ROLLOUT_OPERATION),
        "components (the Trainer)": trainer,
        "components (a Critic)": learning_settings.has_critic(spec),
        "seed": spec.seed,
    }
    if spec.environments:
        limits = _REWARD_LIMITS | _ENVIRONMENT_LIMITS
        parts["environments"] = [e.model_dump(mode="json", exclude_defaults=True, exclude=limits) for e in spec.environments]
    return {name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:16] for name, part in parts.items()}


def _ranges(values: tuple[int, ...]) -> str:
    """``0-3,6`` for (0, 1, 2, 3, 6)."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][1] == value - 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
