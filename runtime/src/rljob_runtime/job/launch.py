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
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.plan import Plan, PlannedComponent
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_runtime.cluster.protocol import Cluster, Worker, WorkerSpec, gather_all
from rljob_runtime.data.source import open_rows
from rljob_runtime.engine.vllm.environment import engine_environment
from rljob_runtime.errors import DeadlineError, ModelError, SetupError, StartupDeadlineError
from rljob_runtime.job import device_sharing, learning_settings, worker_settings
from rljob_runtime.job.model_shape import read_shape
from rljob_runtime.loop.checkpointing import CRITIC_FOLDER, POLICY_FOLDER
from rljob_runtime.loop.driver import IO_TIMEOUT_S
from rljob_runtime.offload.turns import Turns
from rljob_runtime.report import Reporter
from rljob_runtime.rewards.pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINER_FACTORY = "rljob_runtime.training.worker:PolicyWorker"
CRITIC_FACTORY = "rljob_runtime.training.critic:CriticWorker"
ENGINE_FACTORY = "rljob_runtime.engine.vllm.engine:VllmEngine"
REWARD_FACTORY = "rljob_runtime.rewards.pool:RewardPool"
SHUTDOWN_TIMEOUT_S = 20.0
HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The running workers by role."""

    trainers: Sequence[Worker]
    references: Sequence[Worker]
    critics: Sequence[Worker]
    engines: Sequence[Worker]
    rewards: Sequence[Worker]
    turns: Turns
    """Who may use shared devices when."""

    @property
    def all(self) -> list[Worker]:
        """Every worker of the job."""
        return [*self.trainers, *self.references, *self.critics, *self.engines, *self.rewards]


def preflight(spec: RLJobSpec, job_folder: Path | None) -> None:
    """Find out before any process starts what the spec names and is not there: about a second.

    The user's own functions are only looked for when there is a job folder: in a cluster the workers' image decides, not this one.

    Raises:
        SetupError: another Ray is installed than ``spec.rayVersion`` asks for.
        ModelError: neither a local folder nor a Hub id that can be resolved.
        DataError: a file or task that cannot be read, or is empty.
        PluginError: a policy loss or an advantage estimator that cannot be imported from ``job_folder``.
        RewardSetupError: a reward function that cannot be imported from ``job_folder``.
    """
    installed = version("ray")
    if spec.ray_version not in (None, installed):
        raise SetupError(f"spec.rayVersion is {spec.ray_version}, installed is ray {installed}; install that version or change the spec")
    for path in {spec.model.path, spec.model.tokenizer_path or spec.model.path}:
        _check_model_path(path)
    for source in (*spec.data.train, *spec.data.validation):
        open_rows(worker_settings.source_config(source), spec.seed)
    if job_folder is not None:
        learning_settings.check_functions(spec, job_folder)
    functions = [worker_settings.reward_config(r) for r in spec.rewards if r.function is not None]
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
        groups = [by_role[c.role] for c in components if c.role in device_sharing.POLICY_ROLES]
        await _set_up_all([group for group in groups if group], left_s(), float(spec.startup_deadline_seconds))

    with reporter.phase("loading model and engines"):
        if device_sharing.switches(spec, plan):  # an engine measures what is free when it starts
            await start([c for c in plan.components if c.role in device_sharing.POLICY_ROLES])
            await device_sharing.step_aside(spec, plan, by_role, left_s())
            await start([c for c in plan.components if c.role not in device_sharing.POLICY_ROLES])
        else:
            await start(plan.components)
    turns = device_sharing.turns_of(spec, plan, by_role, read_shape(spec), reporter.switched)
    reporter.resident(turns.residency())
    return Workers(
        trainers=by_role[Role.TRAINER],
        references=by_role[Role.REFERENCE],
        critics=by_role[Role.CRITIC],
        engines=by_role[Role.ROLLOUT],
        rewards=by_role[Role.REWARD],
        turns=turns,
    )


async def load_policy(workers: Workers, folder: Path, step: int) -> None:
    """Put trainer and critic where the checkpoint in ``folder``, made after ``step`` steps, stood."""
    async with workers.turns.training(step):
        await gather_all([w.start("load_checkpoint", str(folder / POLICY_FOLDER)) for w in workers.trainers], IO_TIMEOUT_S)
    if workers.critics:
        async with workers.turns.valuing(step):
            await gather_all([w.start("load_checkpoint", str(folder / CRITIC_FOLDER)) for w in workers.critics], IO_TIMEOUT_S)


async def export(spec: RLJobSpec, workers: Workers, folder: Path) -> None:
    """Write the trained policy as a Hugging Face folder, with its tokenizer also when that came from elsewhere.

    Raises:
        DeadlineError: it took too long.
    """
    async with workers.turns.training(spec.training.steps):
        await gather_all([w.start("export_hf", str(folder)) for w in workers.trainers], IO_TIMEOUT_S)
    if spec.model.tokenizer_path is not None:
        await asyncio.to_thread(lambda: load_tokenizer(spec).save_pretrained(folder))


async def shut_down(cluster: Cluster, workers: Workers | None = None) -> None:
    """End all workers, reward workers in order so that their children end with them, then the cluster."""
    if workers is not None:
        endings = [w.start("close").result(SHUTDOWN_TIMEOUT_S) for w in workers.rewards]
        await asyncio.gather(*endings, return_exceptions=True)
    await cluster.stop()


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
    shared, host_shares = device_sharing.shared_devices(plan), device_sharing.host_shares(spec, plan)
    for process in component.processes:
        on_cpu = worker_settings.device_type(spec, plan, process) is DeviceType.CPU
        num_threads = worker_settings.threads(spec, plan, component, process)
        env = worker_settings.worker_env(spec, plan, component, process)
        kwargs: dict[str, Any]
        if component.role is Role.ROLLOUT:
            config = worker_settings.engine_config(
                spec,
                worker_settings.component_spec(spec, component.name),
                on_cpu=on_cpu,
                num_threads=num_threads,
                takes_turns=device_sharing.takes_turns(spec, component, process, shared),
            )
            factory, kwargs, concurrency = ENGINE_FACTORY, {"config": config}, 4
            env = engine_environment(config) | env
        elif component.role is Role.REWARD:
            configs = [worker_settings.reward_config(r) for r in spec.rewards]
            log_file = log_dir / f"{component.name}-{process.rank}.log"
            factory, kwargs, concurrency = REWARD_FACTORY, {"configs": configs, "folder": job_folder, "log_file": log_file}, 1
        else:
            policy = worker_settings.policy_config(
                spec,
                role=component.role,
                num_threads=num_threads,
                offload_host_bytes=host_shares.get((component.name, process.node_rank)),
                reserve=device_sharing.leaving(spec, component),
                optimizer_around_step=device_sharing.optimizer_around_step(spec, component),
                job_folder=job_folder,
            )
            is_critic = component.role is Role.CRITIC
            factory, concurrency = CRITIC_FACTORY if is_critic else TRAINER_FACTORY, 1
            trained = learning_settings.critic_config(spec, policy) if is_critic else policy
            kwargs = {"config": trained, "rank": process.rank, "world_size": component.world_size}
        made.append(
            WorkerSpec(
                name=f"{component.name}-{process.rank}",
                factory=factory,
                kwargs=kwargs,
                node_rank=process.node_rank,
                cuda_devices=() if on_cpu else process.local_devices,
                env=env,
                interpreter=worker_settings.interpreter(spec, plan, component, process),
                concurrency=concurrency,
            )
        )
    return made


def load_tokenizer(spec: RLJobSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy.

    Raises:
        ModelError: it cannot be loaded.
    """
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
