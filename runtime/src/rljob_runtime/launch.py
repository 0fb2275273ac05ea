"""Brings a job's workers up and wires them: everything between a plan and the loop.

Order: cluster -> all workers at once -> process groups and engines in parallel -> turns -> manifest -> prompt source -> parts. Where
components switch, policies start first and leave their devices before engines measure what is free there.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.plan import Plan, PlannedComponent
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.learning import AdvantageEstimator
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.operations import UpdateMode
from rljob_runtime import resolve, time_division
from rljob_runtime.checkpointing import POLICY_FOLDER, Checkpoints, DriverState
from rljob_runtime.cluster.protocol import Cluster, Worker, WorkerSpec, gather_all
from rljob_runtime.data.source import PromptSource, open_rows
from rljob_runtime.driver import IO_TIMEOUT_S, LoopConfig, Parts
from rljob_runtime.engine.environment import engine_environment
from rljob_runtime.errors import DeadlineError, ModelError, SetupError, StartupDeadlineError
from rljob_runtime.model_shape import read_shape
from rljob_runtime.offload.turns import Turns
from rljob_runtime.overlap.batching import AdvantageFunction, BatchingConfig
from rljob_runtime.overlap.judge import RewardRouter
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.staleness import StalenessGate
from rljob_runtime.records import Prompt
from rljob_runtime.report import Reporter
from rljob_runtime.rewards.pool import RewardPool
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.publisher import MAX_DIFFERENCE, ProbeConfig, WeightPublisher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINER_FACTORY = "rljob_runtime.training.worker:PolicyWorker"
ENGINE_FACTORY = "rljob_runtime.engine.vllm_engine:VllmEngine"
REWARD_FACTORY = "rljob_runtime.rewards.pool:RewardPool"
SHUTDOWN_TIMEOUT_S = 20.0
HUB_TIMEOUT_S = 10.0
PROBE_TOKENS = 64
"""Tokens of one probe sequence at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The running workers by role."""

    trainers: Sequence[Worker]
    references: Sequence[Worker]
    engines: Sequence[Worker]
    rewards: Sequence[Worker]
    turns: Turns
    """Who may use shared devices when."""

    @property
    def all(self) -> list[Worker]:
        """Every worker of the job."""
        return [*self.trainers, *self.references, *self.engines, *self.rewards]


def preflight(spec: RLJobSpec, job_folder: Path | None) -> None:
    """Find out before any process starts what the spec names and is not there: about a second.

    Reward functions are only looked for when there is a job folder: in a cluster the reward workers' image decides, not this one.

    Raises:
        SetupError: another Ray is installed than ``spec.rayVersion`` asks for.
        ModelError: neither a local folder nor a Hub id that can be resolved.
        DataError: a file or task that cannot be read, or is empty.
        RewardSetupError: a reward function that cannot be imported from ``job_folder``.
    """
    installed = version("ray")
    if spec.ray_version not in (None, installed):
        raise SetupError(f"spec.rayVersion is {spec.ray_version}, installed is ray {installed}; install that version or change the spec")
    for path in {spec.model.path, spec.model.tokenizer_path or spec.model.path}:
        _check_model_path(path)
    for source in spec.data.train:
        open_rows(resolve.source_config(source), spec.seed)
    functions = [resolve.reward_config(r) for r in spec.rewards if r.function is not None]
    if functions and job_folder is not None:
        with tempfile.TemporaryDirectory() as folder:
            RewardPool(functions, log_file=Path(folder) / "rewards.log", folder=job_folder).close()


async def launch(job: RLJob, plan: Plan, cluster: Cluster, reporter: Reporter, job_folder: Path | None, log_dir: Path) -> Workers:
    """Start the cluster and all workers; returns when trainers, references and engines hold the model.

    Raises:
        ClusterError, WorkerLostError, WorkerFailedError, ModelError, RewardSetupError, StartupDeadlineError.
    """
    spec = job.spec
    deadline = time.monotonic() + spec.startup_deadline_seconds

    def left_s() -> float:
        return max(deadline - time.monotonic(), 1.0)

    with reporter.phase("starting the Ray cluster"):
        await cluster.start(plan, left_s(), reporter.event)
    by_role: dict[Role, list[Worker]] = {role: [] for role in Role}

    async def start(components: Sequence[PlannedComponent]) -> None:
        specs = {c.name: worker_specs(spec, plan, c, job_folder, log_dir) for c in components}
        started = iter(await cluster.start_workers([s for part in specs.values() for s in part], left_s()))
        for component in components:
            by_role[component.role] += [next(started) for _ in specs[component.name]]
        groups = [by_role[c.role] for c in components if c.role in time_division.POLICY_ROLES]
        await _set_up_all([group for group in groups if group], left_s(), float(spec.startup_deadline_seconds))

    with reporter.phase("loading model and engines"):
        if time_division.switches(spec, plan):  # an engine measures what is free when it starts
            await start([c for c in plan.components if c.role in time_division.POLICY_ROLES])
            await time_division.step_aside(spec, plan, by_role, left_s())
            await start([c for c in plan.components if c.role not in time_division.POLICY_ROLES])
        else:
            await start(plan.components)
    turns = time_division.turns_of(spec, plan, by_role, read_shape(spec), reporter.switched)
    reporter.resident(turns.residency())
    return Workers(
        trainers=by_role[Role.TRAINER],
        references=by_role[Role.REFERENCE],
        engines=by_role[Role.ROLLOUT],
        rewards=by_role[Role.REWARD],
        turns=turns,
    )


async def load_policy(workers: Workers, folder: Path, step: int) -> None:
    """Put the trainer where the checkpoint in ``folder``, made after ``step`` steps, stood."""
    async with workers.turns.training(step):
        await gather_all([w.start("load_checkpoint", str(folder / POLICY_FOLDER)) for w in workers.trainers], IO_TIMEOUT_S)


async def assemble(
    spec: RLJobSpec, workers: Workers, store: Checkpoints, state: DriverState | None, reporter: Reporter
) -> tuple[Parts, LoopConfig]:
    """Wire the loop's parts over running workers; ``state`` is where a resumed run goes on."""
    tokenizer = await asyncio.to_thread(_load_tokenizer, spec)
    source = await asyncio.to_thread(make_source, spec, tokenizer)
    probe = _probe(spec, source.next(spec.weight_sync.probe.sequences))
    source = await asyncio.to_thread(make_source, spec, tokenizer)
    if state is not None:
        source.restore(state.source_state)
    specs = await workers.trainers[0].call("weight_specs", timeout_s=IO_TIMEOUT_S)
    start_step = state.step if state else 0
    batch = spec.rollout.prompts_per_step
    scheduler = RolloutScheduler(
        prompts=source,
        decode=partial(_decode, tokenizer),
        engines=workers.engines,
        judge=RewardRouter(workers.rewards, sum(r.timeout_seconds for r in spec.rewards)).judge,
        gate=StalenessGate(
            groups_per_step=batch,
            max_lag=spec.overlap.async_generation_ratio,
            total_groups=batch * spec.training.steps,
            version=start_step,
        ),
        config=resolve.rollout_config(spec),
        next_group_id=state.next_group_id if state else 0,
        done=state.done if state else (),
    )
    publisher = WeightPublisher(
        trainers=workers.trainers,
        engines=workers.engines,
        manifest=plan_buckets(specs, spec.weight_sync.bucket_bytes),
        timeout_s=spec.weight_sync.timeout_seconds,
        probe=probe,
        on_running="keep" if spec.overlap.update_mode is UpdateMode.IN_FLIGHT else "recompute",
    )
    parts = Parts(
        trainers=workers.trainers,
        references=workers.references,
        workers=workers.all,
        scheduler=scheduler,
        publisher=publisher,
        advantage=_advantage(spec),
        checkpoints=store,
        turns=workers.turns,
        reporter=reporter,
    )
    return parts, _loop_config(spec, len(workers.trainers))


async def export(spec: RLJobSpec, workers: Workers, folder: Path) -> None:
    """Write the trained policy as a Hugging Face folder, with its tokenizer also when that came from elsewhere.

    Raises:
        DeadlineError: it took too long.
    """
    async with workers.turns.training(spec.training.steps):
        await gather_all([w.start("export_hf", str(folder)) for w in workers.trainers], IO_TIMEOUT_S)
    if spec.model.tokenizer_path is not None:
        await asyncio.to_thread(lambda: _load_tokenizer(spec).save_pretrained(folder))


async def shut_down(cluster: Cluster, workers: Workers | None = None) -> None:
    """End all workers, reward workers in order so that their children end with them, then the cluster."""
    if workers is not None:
        endings = [w.start("close").result(SHUTDOWN_TIMEOUT_S) for w in workers.rewards]
        await asyncio.gather(*endings, return_exceptions=True)
    await cluster.stop()


def make_source(spec: RLJobSpec, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    """The training prompts."""
    return PromptSource(
        [resolve.source_config(s) for s in spec.data.train],
        tokenizer,
        seed=spec.seed,
        max_prompt_tokens=spec.rollout.max_prompt_tokens,
        prompt_format=resolve.prompt_format(spec),
    )


async def _set_up_all(groups: Sequence[Sequence[Worker]], timeout_s: float, collective_timeout_s: float) -> None:
    """Form all process groups at once; ``collective_timeout_s`` bounds every later collective of theirs.

    Raises:
        StartupDeadlineError: one did not form within ``timeout_s``.
    """
    try:
        await asyncio.gather(*(_set_up(group, timeout_s, collective_timeout_s) for group in groups))
    except DeadlineError as error:
        raise StartupDeadlineError(f"{error} (spec.startupDeadlineSeconds)") from error


async def _set_up(group: Sequence[Worker], timeout_s: float, collective_timeout_s: float) -> None:
    """Form the process group of one component and load its model."""
    host, port = await group[0].address(timeout_s)
    await gather_all([w.start("setup", host, port, collective_timeout_s) for w in group], timeout_s)


def worker_specs(spec: RLJobSpec, plan: Plan, component: PlannedComponent, job_folder: Path | None, log_dir: Path) -> list[WorkerSpec]:
    """The workers of one component by rank: what to construct, on which node, with which devices, environment and Python."""
    made = []
    shared, host_shares = time_division.shared_devices(plan), time_division.host_shares(spec, plan)
    for process in component.processes:
        on_cpu = resolve.device_type(spec, plan, process) is DeviceType.CPU
        num_threads = resolve.threads(spec, plan, component, process)
        env = resolve.worker_env(spec, plan, component, process)
        kwargs: dict[str, Any]
        if component.role is Role.ROLLOUT:
            config = resolve.engine_config(
                spec,
                resolve.component_spec(spec, component.name),
                on_cpu=on_cpu,
                num_threads=num_threads,
                takes_turns=time_division.takes_turns(spec, component, process, shared),
            )
            factory, kwargs, concurrency = ENGINE_FACTORY, {"config": config}, 4
            env = engine_environment(config) | env
        elif component.role is Role.REWARD:
            configs = [resolve.reward_config(r) for r in spec.rewards]
            log_file = log_dir / f"{component.name}-{process.rank}.log"
            factory, kwargs, concurrency = REWARD_FACTORY, {"configs": configs, "folder": job_folder, "log_file": log_file}, 1
        else:
            policy = resolve.policy_config(
                spec,
                role=component.role,
                num_threads=num_threads,
                offload_host_bytes=host_shares.get((component.name, process.node_rank)),
                reserve=time_division.leaving(spec, component),
                optimizer_around_step=time_division.optimizer_around_step(spec, component),
            )
            factory, concurrency = TRAINER_FACTORY, 1
            kwargs = {"config": policy, "rank": process.rank, "world_size": component.world_size}
        made.append(
            WorkerSpec(
                name=f"{component.name}-{process.rank}",
                factory=factory,
                kwargs=kwargs,
                node_rank=process.node_rank,
                cuda_devices=() if on_cpu else process.local_devices,
                env=env,
                interpreter=resolve.interpreter(spec, plan, component, process),
                concurrency=concurrency,
            )
        )
    return made


def _loop_config(spec: RLJobSpec, num_ranks: int) -> LoopConfig:
    return LoopConfig(
        total_steps=spec.training.steps,
        groups_per_step=spec.rollout.prompts_per_step,
        step_timeout_s=spec.training.step_timeout_seconds,
        take_timeout_s=spec.active_deadline_seconds or 366 * 24 * 3600.0,
        checkpoint_every_steps=spec.checkpoint.every_steps,
        batching=BatchingConfig(
            num_ranks=num_ranks,
            mini_batches=spec.training.mini_batches,
            epochs=spec.training.epochs,
            temperature=spec.rollout.temperature,
        ),
        spec_fingerprint=resolve.spec_fingerprint(spec),
    )


def _probe(spec: RLJobSpec, prompts: Sequence[Prompt]) -> ProbeConfig:
    """Probes are the first prompts of the data, cut to a length that costs nothing."""
    wanted = spec.weight_sync.probe
    return ProbeConfig(
        every_syncs=wanted.every_syncs,
        max_difference=wanted.max_difference or MAX_DIFFERENCE[spec.model.dtype.value],
        sequences=tuple(p.token_ids[:PROBE_TOKENS] for p in prompts if len(p.token_ids) > 1),
    )


def _advantage(spec: RLJobSpec) -> AdvantageFunction:
    from rljob_runtime.losses import advantage

    wanted = spec.algorithm.advantage
    if wanted.estimator is AdvantageEstimator.RLOO:
        return advantage.leave_one_out
    return partial(advantage.group_advantages, normalize_std=wanted.normalize_std)


def _decode(tokenizer: PreTrainedTokenizerBase, responses: list[tuple[int, ...]]) -> list[str]:
    return list(tokenizer.batch_decode(responses, skip_special_tokens=True))


def _load_tokenizer(spec: RLJobSpec) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    path = spec.model.tokenizer_path or spec.model.path
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=spec.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {path} cannot be loaded: {error}; set spec.model.tokenizerPath if it lies elsewhere") from error
    return tokenizer


def _check_model_path(path: str) -> None:
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{path} is a folder without config.json; spec.model.path must name a Hugging Face model folder or a Hub id")
        return
    from huggingface_hub import model_info, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(path, "config.json"), str):
            return
        model_info(path, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # errors of whichever HTTP library the client carries come through; all mean: not to be had
        raise ModelError(
            f"spec.model.path {path!r}: no such folder here ({Path.cwd()}), and not to be had from the Hub ({type(error).__name__}); "
            "make the quickstart's model with `rljob model tiny --out models/tiny`, or name a folder that exists"
        ) from error
