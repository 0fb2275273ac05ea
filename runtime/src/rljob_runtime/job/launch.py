"""Brings a job's workers up: everything between a plan and running components.

Order: cluster -> models of a Hub, once per node -> workers, stage by stage, process groups beside engines -> what workers say of
their node -> device leases -> components. Where components switch, policies start first and release their devices before engines
measure what is free there; the engines' processes are there by then, and have imported what they need.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rljob_api.errors import SpecInvalidError
from rljob_api.memory import ModelShape, Served, chosen_reduction, served_shapes
from rljob_api.planning.plan import Plan, PlannedComponent
from rljob_api.planning.sync_routes import chosen_backend, chosen_senders, engine_nodes, neighbors, trainer_nodes
from rljob_api.rules.model import model_problems
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_runtime.checkpoint_files import FileSum
from rljob_runtime.cluster.protocol import Cluster, Worker, WorkerSpec, gather_all
from rljob_runtime.cluster.replaceable import ReplaceableWorker
from rljob_runtime.data import tokenizer
from rljob_runtime.data.source import open_rows, tags_of
from rljob_runtime.engine.registry import check_engines
from rljob_runtime.errors import DataError, SetupError
from rljob_runtime.job import device_sharing, learning_settings, models, worker_settings
from rljob_runtime.job.judge_settings import Share
from rljob_runtime.job.model_shape import read_config, read_shape
from rljob_runtime.job.models import ModelSources
from rljob_runtime.job.process_groups import ProcessGroups
from rljob_runtime.job.roles import ROLES, WorkerContext
from rljob_runtime.job.stages import run_in_turn
from rljob_runtime.job.standby import standby_processes
from rljob_runtime.job.teacher import check_taught, check_teachers
from rljob_runtime.loop.saving import IO_TIMEOUT_S
from rljob_runtime.loop.workers import Component, JobWorkers
from rljob_runtime.offload.worker_group import WorkerGroup
from rljob_runtime.report import Reporter
from rljob_runtime.report.trackers import check_installed
from rljob_runtime.rewards.config import check_tags
from rljob_runtime.rewards.pool import RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHUTDOWN_TIMEOUT_S = 20.0


def preflight(spec: RLJobSpec, job_folder: Path | None, earlier_commits: Mapping[str, str] = MappingProxyType({})) -> ModelSources:
    """Find out before any process starts what the spec names and is not there: about a second, and a few requests for a model on the Hub.

    The user's own functions and the engines' packages are only looked for when there is a job folder: in a cluster the workers' image
    decides, not this one. ``earlier_commits`` are those of Hub models that the run used before (:func:`.models.recorded`).

    Returns:
        Where the model comes from.

    Raises:
        SetupError: another Ray is installed than ``spec.rayVersion`` asks for, or an engine's or a tracker's package is not.
        SpecInvalidError: an engine does not take an argument of ``engine.extraArgs``, or the model is of a kind that cannot be trained.
        ModelError: neither a local folder nor a model of the Hub that this machine may read, or a teacher with another vocabulary.
        DataError: a file or task that cannot be read, or is empty.
        PluginError: a policy loss or an advantage estimator that cannot be imported from ``job_folder``.
        RewardSetupError: a tag of the data without a reward, or a reward function that cannot be imported from ``job_folder``.
    """
    installed = version("ray")
    if spec.ray_version not in (None, installed):
        raise SetupError(f"spec.rayVersion is {spec.ray_version}, installed is ray {installed}; install that version or change the spec")
    check_installed(spec.report.trackers)
    sources = models.locate(spec, earlier_commits, retries=job_folder is None)  # a pod's network may come up late; a user waits
    found = models.with_folders(spec, sources.here)  # after a download files may be there for the first time
    if problems := model_problems(spec, lambda model: read_config(models.at_folder(model, sources.here))):
        raise SpecInvalidError(problems)
    check_teachers(found, spec)
    tags: dict[str, str] = {}
    tags_by_source = _read_sources(spec)
    for index, (source, found_tags) in enumerate(zip((*spec.data.train, *spec.data.validation), tags_by_source, strict=True)):
        if index < len(spec.data.train):
            check_taught(spec, source.name, found_tags)
        tags |= dict.fromkeys(found_tags, f"data source {source.name!r}")
    rewards = [worker_settings.reward_config(reward, Share()) for reward in spec.rewards]
    if rewards:  # a teacher alone scores by no tag
        check_tags(rewards, tags)
    if job_folder is not None:
        learning_settings.check_functions(spec, job_folder)
    check_engines(spec, on_this_python=job_folder is not None)
    functions = [reward for reward in rewards if reward.has_function]
    if functions and job_folder is not None:
        with tempfile.TemporaryDirectory() as folder:
            RewardPool(functions, log_file=Path(folder) / "rewards.log", folder=job_folder).close()
    return sources


def _read_sources(spec: RLJobSpec) -> list[frozenset[str]]:
    """The tags of each data source, training first.

    Raises:
        DataError: with the problems of all sources, one after another.
    """
    tags: list[frozenset[str]] = []
    problems: list[str] = []
    for source in (*spec.data.train, *spec.data.validation):
        config = worker_settings.source_config(source, spec)
        try:
            tags.append(tags_of(config, open_rows(config, spec.seed)))
        except DataError as error:
            problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return tags


async def launch(
    job: RLJob,
    plan: Plan,
    cluster: Cluster,
    reporter: Reporter,
    job_folder: Path | None,
    log_dir: Path,
    sources: ModelSources,
    kept: Mapping[str, Sequence[Worker]] | None = None,
) -> JobWorkers:
    """Start the cluster, have every node download what lies on the Hub, start all workers; returns when all have loaded their model.

    ``kept``: workers of components that run already, on this cluster (:func:`.restarting.end_others`); None: nothing runs yet.

    Raises:
        ClusterError, WorkerLostError, WorkerFailedError, ModelError, DownloadError, RewardSetupError, StartupDeadlineError.
    """
    spec = job.spec
    deadline = time.monotonic() + spec.startup_deadline_seconds

    def left_s() -> float:
        return max(deadline - time.monotonic(), 1.0)

    if kept is None:
        with reporter.phase("starting the Ray cluster"):
            await cluster.start(plan, left_s(), reporter.event)
    folders: Mapping[int, models.Folders] = {}
    if sources.models:
        with reporter.phase("downloading the model"):
            folders = await models.download(sources, spec, plan, cluster, left_s(), reporter.event)
    here = models.with_folders(spec, sources.here)
    importing = asyncio.get_running_loop().run_in_executor(None, tokenizer.import_ahead, _tokenizer_path(here))  # the driver's, for later
    shape, served = read_shape(here.model), served_shapes(here, read_shape)
    running: dict[str, list[Worker]] = {name: list(workers) for name, workers in (kept or {}).items()}
    starting = [component for component in plan.components if component.name not in running]
    stages = [[c for c in stage if c in starting] for stage in device_sharing.start_stages(spec, plan)]

    async def start(stage: Sequence[PlannedComponent], turn: asyncio.Event) -> None:
        specs = {c.name: worker_specs(spec, plan, c, job_folder, log_dir, folders, shape, served) for c in stage}
        started = await _start_together(spec, stage, specs, cluster, left_s, turn)
        for c in stage:
            running[c.name] = _replaceable(spec, plan, c, started[c.name], specs[c.name], cluster, reporter)
        await asyncio.gather(*(_serve(running[c.name], left_s()) for c in stage if ROLES[c.role].serves))
        if stage is not stages[-1]:
            await device_sharing.release_devices(spec, stage, running, left_s())

    with reporter.phase("loading model and engines"):
        await run_in_turn([partial(start, stage) for stage in stages])
    await importing
    for component in starting:
        if (says := ROLES[component.role].says) is not None:
            reporter.event(f"{component.name}: {await running[component.name][0].call(says, timeout_s=left_s())}")
    leases = device_sharing.lease_devices(spec, plan, running, shape, reporter.switched, served=served)
    made = job_workers(spec, plan, running, leases)
    reporter.resident(made.residency())
    return made


async def _start_together(
    spec: RLJobSpec,
    components: Sequence[PlannedComponent],
    specs: Mapping[str, Sequence[WorkerSpec]],
    cluster: Cluster,
    left_s: Callable[[], float],
    turn: asyncio.Event,
) -> dict[str, list[Worker]]:
    """Start the workers of one stage at its turn, and form the process groups among them; returns them by component."""
    grouped = {c.name: c for c in components if ROLES[c.role].process_group}
    names = {name: [s.name for s in specs[name]] for name in grouped}
    async with ProcessGroups(grouped, names, left_s, timeout_s=float(spec.startup_deadline_seconds)) as groups:
        all_specs = [s for part in specs.values() for s in part]
        started = iter(await groups.beside(cluster.start_workers(all_specs, left_s(), groups.add, turn)))
        await groups.formed()
    return {name: [next(started) for _ in part] for name, part in specs.items()}


def _replaceable(
    spec: RLJobSpec,
    plan: Plan,
    component: PlannedComponent,
    workers: list[Worker],
    specs: Sequence[WorkerSpec],
    cluster: Cluster,
    reporter: Reporter,
) -> list[Worker]:
    """Workers of a role that may be replaced by others, each able to; those of other roles as they are."""
    if not ROLES[component.role].replaceable:
        return workers
    standby = standby_processes(spec, plan, component.name, specs, cluster, reporter.event)
    return [ReplaceableWorker(w, s, cluster, standby.get(s.node_rank)) for w, s in zip(workers, specs, strict=True)]


def job_workers(spec: RLJobSpec, plan: Plan, running: Mapping[str, Sequence[Worker]], leases: device_sharing.DeviceLeases) -> JobWorkers:
    """All running components of a job as the loop uses them."""
    return JobWorkers(
        components=tuple(_component(spec, c, running[c.name], leases) for c in plan.components),
        arbiter=leases.arbiter,
        sync_backend=chosen_backend(spec, plan),
        judges_displace_engines=_judges_displace_engines(plan),
        sync_senders=chosen_senders(spec, plan),
        sync_neighbors=neighbors(spec, plan),
        sync_engine_nodes=engine_nodes(plan),
        sync_sender_nodes=trainer_nodes(plan),
    )


def _judges_displace_engines(plan: Plan) -> bool:
    engines = {device for component in plan.with_role(Role.ROLLOUT) for device in component.device_set()}
    return any(engines & component.device_set() for component in plan.with_role(Role.JUDGE))


def _component(spec: RLJobSpec, planned: PlannedComponent, workers: Sequence[Worker], leases: device_sharing.DeviceLeases) -> Component:
    """A running component as the loop uses it."""
    description, component_spec = ROLES[planned.role], worker_settings.component_spec(spec, planned.name)
    clients = leases.clients.get(planned.name)
    group = WorkerGroup(
        planned.name,
        workers,
        timeout_s=float(spec.training.step_timeout_seconds),
        arbiter=None if clients is None else leases.arbiter,
        clients=clients,
    )
    return Component(
        role=planned.role,
        group=group,
        phase=description.phase,
        scorings=description.scorings_in(spec),
        tags=() if (teaches := component_spec.teaches) is None else teaches.sources,
        ranks_per_share=spec.processes_per_share(component_spec),
        checkpoint_folder=description.checkpoint_folder,
        survivable=description.replaceable,
    )


async def load_checkpoint(workers: JobWorkers, folder: Path, step: int) -> None:
    """Put every component that is saved where the checkpoint in ``folder``, made after ``step`` steps, stood."""
    for component in workers.components:
        if component.checkpoint_folder is not None:
            async with component.leased(step):
                path = str(folder / component.checkpoint_folder)
                await gather_all([w.start("load_checkpoint", path) for w in component.workers], IO_TIMEOUT_S)


async def find_damage(workers: JobWorkers, folder: Path, files: Sequence[FileSum]) -> list[str]:
    """What is wrong with the checkpoint in ``folder``; its files are read on the nodes of the workers that load it, each file once."""
    readers = [worker for component in workers.components if component.checkpoint_folder is not None for worker in component.workers]
    shares = [files[index :: len(readers)] for index in range(len(readers))]
    found = await gather_all([w.start("damaged_files", str(folder), s) for w, s in zip(readers, shares, strict=True)], IO_TIMEOUT_S)
    return [problem for problems in found for problem in problems]


async def export(spec: RLJobSpec, workers: JobWorkers, folder: Path, sources: ModelSources) -> None:
    """Write the trained policy as a Hugging Face folder, with its tokenizer also when that came from elsewhere.

    Raises:
        DeadlineError: it took too long.
    """
    async with workers.trainer.leased(spec.training.steps):
        await gather_all([w.start("export_hf", str(folder)) for w in workers.trainer.workers], IO_TIMEOUT_S)
    if spec.model.tokenizer_path is not None:
        await asyncio.to_thread(lambda: load_tokenizer(models.with_folders(spec, sources.here)).save_pretrained(folder))


async def shut_down(cluster: Cluster, workers: JobWorkers | None = None) -> None:
    """End all workers, those that have processes of their own in order so that these end with them, then the cluster."""
    if workers is not None:
        closing = [w for component in workers.components if ROLES[component.role].closes for w in component.workers]
        endings = [w.start("close").result(SHUTDOWN_TIMEOUT_S) for w in closing]
        await asyncio.gather(*endings, return_exceptions=True)
    await cluster.stop()


async def _serve(workers: Sequence[Worker], timeout_s: float) -> None:
    """Start the servers of one component, with a key of their own.

    Raises:
        ModelError: a server ended.
        StartupDeadlineError: one does not answer within ``timeout_s``.
    """
    key = secrets.token_urlsafe(32)
    places = await asyncio.gather(*(worker.address(timeout_s) for worker in workers))
    calls = [worker.start("serve", host, port, key, timeout_s) for worker, (host, port) in zip(workers, places, strict=True)]
    await gather_all(calls, timeout_s + SHUTDOWN_TIMEOUT_S)


def worker_specs(
    spec: RLJobSpec,
    plan: Plan,
    component: PlannedComponent,
    job_folder: Path | None,
    log_dir: Path,
    folders: Mapping[int, models.Folders] = MappingProxyType({}),
    shape: ModelShape | None = None,
    served: Served | None = None,
) -> list[WorkerSpec]:
    """The workers of one component by rank: what to construct, on which node, with which devices, environment and Python.

    ``folders`` says by rank of the node where models of the Hub lie there, ``shape`` and ``served`` their sizes where known.
    """
    made, reduction = [], chosen_reduction(spec, plan, shape, served)
    devices = device_sharing.device_uses(spec, plan)
    for process in component.processes:
        context = WorkerContext(
            spec=models.with_folders(spec, folders.get(process.node_rank, {})),
            plan=plan,
            component=component,
            process=process,
            on_cpu=worker_settings.device_type(spec, plan, process) is DeviceType.CPU,
            num_threads=worker_settings.threads(spec, plan, component, process),
            devices=devices(component, process),
            job_folder=job_folder,
            log_dir=log_dir,
            gradient_reduction=reduction,
        )
        settings = ROLES[component.role].settings(context)
        made.append(
            WorkerSpec(
                name=f"{component.name}-{process.rank}",
                factory=settings.factory,
                kwargs=dict(settings.kwargs),
                node_rank=process.node_rank,
                cuda_devices=() if context.on_cpu else process.local_devices,
                env=dict(settings.environment) | worker_settings.worker_env(spec, plan, component, process),
                interpreter=worker_settings.interpreter(spec, plan, component, process),
                concurrency=settings.concurrency,
            )
        )
    return made


def load_tokenizer(spec: RLJobSpec) -> PreTrainedTokenizerBase:
    """The tokenizer of the policy.

    Raises:
        ModelError: it cannot be loaded.
    """
    return tokenizer.load_tokenizer(_tokenizer_path(spec), trust_remote_code=spec.model.trust_remote_code)


def _tokenizer_path(spec: RLJobSpec) -> str:
    return spec.model.tokenizer_path or spec.model.path
