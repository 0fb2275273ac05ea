"""Who leases shared devices, with which sizes, budgets and policies; and that what validation accepts finds room."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from rljob_api import memory, planner
from rljob_api.errors import SpecInvalidError
from rljob_api.planning.plan import PlacementMode, Plan
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import OffloadPolicy, Role
from rljob_api.validation import CheckedJob, check
from rljob_runtime.errors import NoRoomError
from rljob_runtime.job import device_sharing, launch
from rljob_runtime.job.roles import DeviceUse
from rljob_runtime.loop.driver import NO_DEADLINE_S
from rljob_runtime.loop.saving import IO_TIMEOUT_S
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.records import SwitchRecord
from rljob_runtime.offload.states import StateKind, SwitchReport
from tests.support.arbiter_fakes import D0, GRADS, KV, OPTIMIZER, OTHER, PARAMS, Memory, MemoryWorker, make_client
from tests.support.virtual_time import run_virtual
from tests.unit.api.manifests import manifest
from tests.unit.api.model_configs import CONFIGS

GIB = 2**30
SHAPE = memory.shape_from_count(1_000_000_000)
CUDA: dict[str, Any] = {"name": "gpus", "devicesPerNode": 4, "deviceMemory": "80Gi"}


def component(name: str, role: str, ranks: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "placement": {"ranks": ranks}, **more}


def document(*components: dict[str, Any], group: dict[str, Any] = CUDA, **sections: Any) -> dict[str, Any]:
    made = manifest()
    made["spec"] |= {"nodeGroups": [group], "components": [*components, manifest()["spec"]["components"][2]], **sections}
    made["spec"]["model"]["dtype"] = "bfloat16"
    if any(c["role"] == "Reference" for c in components):
        made["spec"]["algorithm"] = {"kl": {"coefficient": 0.1}}
    return made


def planned(made: dict[str, Any]) -> tuple[RLJobSpec, Plan]:
    spec = RLJob.model_validate_json(json.dumps(made)).spec
    return spec, planner.plan(spec)


def partial_mode(**offload: Any) -> tuple[RLJobSpec, Plan]:
    """The trainer on two of the four devices that three engines have, of which the second has two."""
    infer = component("infer", "Rollout", "0-3")
    train = component("train", "Trainer", "1-2", offload=offload.pop("trainer", {}))
    return planned(document(train, infer, offload={"residency": "Switching", **offload}))


class Policy(MemoryWorker):
    """Of real size, so at a real bus's speed."""

    bytes_per_s = 10e9


class Engine(Policy):
    """Takes the deadline as engines do."""

    async def _offload(self, kinds: tuple[StateKind, ...], timeout_s: float = 0.0) -> SwitchReport:
        return await super()._offload(kinds)

    async def _load(self, kinds: tuple[StateKind, ...], timeout_s: float = 0.0) -> SwitchReport:
        return await super()._load(kinds)


class Job:
    """Fakes of a planned job's workers over a model of its devices' memory, sized by the estimate."""

    def __init__(self, spec: RLJobSpec, plan: Plan, shape: memory.ModelShape | None, budgets: Mapping[Device, int]) -> None:
        self.spec, self.plan, self.shape = spec, plan, shape
        self.memory = Memory(budgets)
        self.running: dict[str, list[Any]] = {component.name: [] for component in plan.components}
        self.needs = memory.process_needs(spec, plan, shape) if shape is not None else None
        self.records: list[SwitchRecord] = []
        for planned_component in plan.components:
            for process in planned_component.processes:
                self._start(planned_component, process)

    def _start(self, planned_component: Any, process: Any) -> None:
        role = planned_component.role
        is_engine = role is Role.ROLLOUT
        kinds = {
            Role.TRAINER: (PARAMS, GRADS, OPTIMIZER, OTHER),
            Role.REFERENCE: (PARAMS, OTHER),
            Role.ROLLOUT: (PARAMS, KV),
            Role.JUDGE: (PARAMS,),
        }.get(role, ())
        held: dict[str, int] = {}
        known = kinds and planned_component.role not in (Role.JUDGE, Role.TEACHER)
        for need in self.needs(planned_component, process).states if self.needs is not None and known else ():
            held[need.kind] = held.get(need.kind, 0) + need.num_bytes
        words = {PARAMS: "weight", OPTIMIZER: "optimizer", KV: "kvCache"}
        sizes = {kind: held.get(words.get(kind, ""), 0) for kind in kinds}
        devices = tuple(Device(process.node_rank, index) for index in process.local_devices)
        made = (Engine if is_engine else Policy)(
            f"{planned_component.name}-{process.rank}", self.memory, devices, sizes, held.get("process", 0)
        )
        offload = next(c.offload for c in self.spec.components if c.name == planned_component.name)
        never = {PARAMS: offload.weight, GRADS: offload.grad, OPTIMIZER: offload.optimizer}
        leaves = not is_engine and device_sharing.switches(self.spec, self.plan) and planned_component.shares_devices_with
        made.start_with(k for k in kinds if not leaves or never.get(k) is OffloadPolicy.NEVER)
        self.running[planned_component.name].append(made)

    def workers(self) -> JobWorkers:
        leases = device_sharing.lease_devices(self.spec, self.plan, self.running, self.shape, self.records.append)
        return launch.job_workers(self.spec, self.plan, self.running, leases)

    def work(self, phase: memory.Phase) -> list[tuple[MemoryWorker, int]]:
        """What computes in a phase, and what that takes beside state."""
        assert self.needs is not None
        working = []
        for planned_component in self.plan.components:
            for process, worker in zip(planned_component.processes, self.running[planned_component.name], strict=True):
                if not worker.sizes or planned_component.role is Role.JUDGE or phase not in self.needs(planned_component, process).active:
                    continue
                needs = self.needs(planned_component, process)
                aside = sum(need.num_bytes for need in needs.states if need.kind == "workspace")
                around = phase == "optimizer step" and use_of(self.spec, self.plan, planned_component.name)[0].optimizer_around_step
                more = worker.sizes[OPTIMIZER] if around else 0
                working.append((worker, aside + more + sum(need.num_bytes for need in needs.working.get(phase, ()))))
        return working

    async def steps(self, count: int) -> None:
        workers = self.workers()
        phases = memory.Phase
        references = workers.with_role(Role.REFERENCE)
        for step in range(count):
            for block, computing in (
                (workers.syncing(step), (phases.WEIGHT_SYNC,)),
                (workers.generating(step), (phases.GENERATE,)),
                *((reference.leased(step), (phases.SCORE,)) for reference in references),
                (workers.trainer.leased(step), (phases.TRAIN, phases.OPTIMIZER_STEP)),
            ):
                async with block:
                    for phase in computing:
                        self.compute(phase)
                    await asyncio.sleep(1)

    def compute(self, phase: memory.Phase) -> None:
        for worker, num_bytes in self.work(phase):
            self.memory.add(f"{worker.name} in {phase}", worker.devices, num_bytes)
        for worker, num_bytes in self.work(phase):
            self.memory.add(worker.name, worker.devices, -num_bytes)


def unlimited(plan: Plan) -> dict[Device, int]:
    return {Device(node.rank, index): 1 << 62 for node in plan.nodes for index in range(node.num_devices)}


def use_of(spec: RLJobSpec, plan: Plan, name: str) -> list[DeviceUse]:
    """How each process of a component uses shared devices."""
    uses, planned_component = device_sharing.device_uses(spec, plan), plan.component(name)
    return [uses(planned_component, process) for process in planned_component.processes]


def leased(spec: RLJobSpec, plan: Plan, shape: memory.ModelShape | None = SHAPE) -> tuple[Any, Any]:
    """(workers, the arbiter's clients: client -> worker)."""

    async def scenario() -> tuple[Any, Any]:
        workers = Job(spec, plan, shape, unlimited(plan)).workers()
        return workers, {p.client: p.worker for device in workers.residency() for p in device.processes}

    found: tuple[Any, Any] = run_virtual(scenario())
    return found


# Who is a client ------------------------------------------------------------------------------------------------------------------


def test_engines_on_devices_of_their_own_are_no_clients_and_never_wait() -> None:
    spec, plan = partial_mode()
    workers, clients = leased(spec, plan)
    assert workers.leased_engines == (1, 2)
    assert set(clients) == {"train", "infer-1", "infer-2"}
    assert device_sharing.shared_devices(plan) == {1, 2}
    assert [use.releases for use in use_of(spec, plan, "infer")] == [False, True, True, False]
    assert all(use.releases for use in use_of(spec, plan, "train"))


def test_policies_that_share_nothing_are_no_clients() -> None:
    spec, plan = planned(
        document(component("train", "Trainer", "0"), component("ref", "Reference", "1"), component("infer", "Rollout", "1-2"))
    )
    _, clients = leased(spec, plan)
    assert set(clients) == {"ref", "infer-0"}


@pytest.mark.parametrize(
    ("ranks", "stages", "clients", "displaces"),
    [
        ("0", [["train"], ["judge"], ["infer", "reward"]], {"train", "judge"}, False),
        ("1", [["train"], ["judge"], ["infer", "reward"]], {"infer-0", "judge"}, True),
        ("0-1", [["train"], ["judge"], ["infer", "reward"]], {"train", "infer-0", "judge"}, True),
        ("3", [["infer", "judge", "reward", "train"]], set(), False),
    ],
)
def test_a_judge_on_shared_devices_starts_alone_and_is_a_client(
    ranks: str, stages: list[list[str]], clients: set[str], displaces: bool
) -> None:
    model = {"model": {"path": "owner/judge"}}
    judge = component("judge", "Judge", ranks, **model)
    spec, plan = planned(
        document(component("train", "Trainer", "0"), component("infer", "Rollout", "1"), judge, offload={"residency": "Switching"})
    )
    assert [sorted(c.name for c in stage) for stage in device_sharing.start_stages(spec, plan)] == stages
    assert [use.releases for use in use_of(spec, plan, "judge")] == [ranks != "3"] * len(plan.component("judge").processes)
    workers, found = leased(spec, plan)
    assert set(found) == clients
    assert workers.judges_displace_engines is displaces
    assert [judge.group.name for judge in workers.leased_judges] == ["judge"] * (ranks != "3")


@pytest.mark.parametrize(
    ("group", "engine", "alone"),
    [
        (CUDA, {}, {"infer-0", "judge"}),
        (CUDA, {"engine": {"type": "SGLang"}}, {"judge"}),
        ({"name": "cores", "devicesPerNode": 4, "deviceType": "CPU"}, {}, set()),
    ],
)
def test_what_measures_its_accelerator_leaves_it_alone(group: dict[str, Any], engine: dict[str, Any], alone: set[str]) -> None:
    judge = component("judge", "Judge", "0", model={"path": "owner/judge"})
    infer, train = component("infer", "Rollout", "0", **engine), component("train", "Trainer", "0")
    spec, plan = planned(document(train, infer, judge, group=group, offload={"residency": "Switching"}))
    workers, _ = leased(spec, plan, None)
    assert {name for name, account in processes_of(workers.arbiter).items() if account.spec.leaves_alone} == alone


def test_engines_that_share_a_device_among_themselves_alone_need_no_lease() -> None:
    engine = {"engine": {"memoryFraction": 0.4}}
    spec, plan = planned(document(component("train", "Trainer", "0"), component("infer", "Rollout", "1:0-1", **engine)))
    assert leased(spec, plan)[0].arbiter is None


def test_an_engine_with_one_of_its_devices_in_common_is_a_client_as_a_whole() -> None:
    engine = {"engine": {"tensorParallelSize": 2}}
    spec, plan = planned(document(component("train", "Trainer", "0"), component("infer", "Rollout", "0-3", **engine)))
    workers, clients = leased(spec, plan)
    assert (workers.leased_engines, set(clients)) == ((0,), {"train", "infer-0"})


@pytest.mark.parametrize("residency", ["Resident", "Switching"])
def test_devices_of_its_own_need_no_lease(residency: str) -> None:
    spec, plan = planned(document(component("train", "Trainer", "0"), component("infer", "Rollout", "1"), offload={"residency": residency}))
    assert leased(spec, plan)[0].arbiter is None
    assert not device_sharing.switches(spec, plan)


def test_residents_exclude_each_other_and_nothing_moves() -> None:
    spec, plan = planned(document(component("train", "Trainer", "0"), component("infer", "Rollout", "0")))

    async def scenario() -> None:
        job = Job(spec, plan, None, unlimited(plan))
        workers = job.workers()
        order = []

        async def block(name: str, held: Any) -> None:
            async with held:
                order.append(f"{name} begins")
                await asyncio.sleep(1)
                order.append(f"{name} ends")

        async with workers.generating(1):
            pass
        arbiter = workers.arbiter
        assert arbiter is not None
        use = [arbiter.use(client, what=client, timeout_s=9, owner=client) for client in ("train", "infer-0")]
        await asyncio.gather(*(block(name, held) for name, held in zip("ab", use, strict=True)))
        assert order == ["a begins", "a ends", "b begins", "b ends"]
        assert job.memory.log == []
        assert job.records == []

    run_virtual(scenario())


# Sizes, budgets, policies ---------------------------------------------------------------------------------------------------------


def processes_of(arbiter: DeviceArbiter) -> dict[str, Any]:
    return {name: account for name, account in arbiter.clients.items()}


def test_without_sizes_every_idle_component_leaves() -> None:
    for shape, memory_text in ((None, "80Gi"), (SHAPE, None)):
        group = {**CUDA, "deviceMemory": memory_text}
        spec, plan = planned(
            document(
                component("train", "Trainer", "0"), component("infer", "Rollout", "0"), group=group, offload={"residency": "Switching"}
            )
        )
        workers, _ = leased(spec, plan, shape)
        accounts = processes_of(workers.arbiter)
        assert {account.spec.policy(PARAMS) for account in accounts.values()} == {OffloadPolicy.ALWAYS}
        assert accounts["infer-0"].spec.kinds == {PARAMS, KV}


def test_with_sizes_auto_stays_until_others_need_the_room() -> None:
    spec, plan = planned(
        document(component("train", "Trainer", "0"), component("infer", "Rollout", "0"), offload={"residency": "Switching"})
    )
    workers, _ = leased(spec, plan)
    train = processes_of(workers.arbiter)["train"]
    assert train.spec.policy(PARAMS) is OffloadPolicy.AUTO
    (process,) = train.spec.processes
    assert process.size_bytes == {PARAMS: 4 * 10**9, OPTIMIZER: 8 * 10**9, GRADS: 0, OTHER: 0}
    assert workers.residency()[0].budget_bytes == 80 * GIB


def test_an_optimizer_around_its_step_is_the_trainers_own_matter() -> None:
    spec, plan = partial_mode(trainer={"optimizer": "Always"})
    assert all(use.optimizer_around_step for use in use_of(spec, plan, "train"))
    assert not any(use.optimizer_around_step for use in use_of(*partial_mode(), "train"))
    workers, _ = leased(spec, plan)
    process = processes_of(workers.arbiter)["train"].spec.processes[0]
    assert OPTIMIZER not in process.size_bytes
    needs = memory.process_needs(spec, plan, SHAPE)(plan.component("train"), plan.component("train").processes[0])
    gradients = sum(need.num_bytes for need in needs.working[memory.Phase.OPTIMIZER_STEP])
    training = sum(need.num_bytes for need in needs.working[memory.Phase.TRAIN])
    assert process.working_bytes == max(training, gradients + 4 * 10**9)


def host_bytes(spec: RLJobSpec, plan: Plan) -> dict[str, set[int | None]]:
    """Host memory that processes may use, by component."""
    return {component.name: {use.host_bytes for use in use_of(spec, plan, component.name)} for component in plan.components}


def test_hold_outlasts_every_block() -> None:
    spec, _ = partial_mode()
    assert device_sharing.hold_s(spec) == NO_DEADLINE_S + spec.training.step_timeout_seconds + IO_TIMEOUT_S
    bounded = spec.model_copy(update={"active_deadline_seconds": 3600})
    assert device_sharing.hold_s(bounded) == 3600 + spec.training.step_timeout_seconds + IO_TIMEOUT_S


def test_host_memory_is_divided_as_state_is() -> None:
    """The trainer copies 12 bytes a parameter over two processes, the reference 2 on one."""
    components = (component("train", "Trainer", "0-1"), component("ref", "Reference", "0"), component("infer", "Rollout", "0-3"))
    spec, plan = planned(document(*components, offload={"residency": "Switching", "hostMemoryBytes": 1400}))
    assert host_bytes(spec, plan) == {"train": {600}, "ref": {200}, "infer": {None}, "reward": {None}}
    unlimited_host = host_bytes(*planned(document(*components, offload={"residency": "Switching"})))
    assert set().union(*unlimited_host.values()) == {None}
    components[0]["offload"] = {"optimizer": "Never"}
    spec, plan = planned(document(*components, offload={"residency": "Switching", "hostMemoryBytes": 1200}))
    assert host_bytes(spec, plan) == {"train": {400}, "ref": {400}, "infer": {None}, "reward": {None}}
    del components[0]["offload"]
    job = document(*components, offload={"residency": "Switching", "hostMemoryBytes": 1000})
    job["spec"]["training"] = {"optimizerStateDtype": "bfloat16"}
    assert host_bytes(*planned(job)) == {"train": {400}, "ref": {200}, "infer": {None}, "reward": {None}}


def test_only_what_may_leave_is_released() -> None:
    spec, plan = partial_mode(trainer={"weight": "Never"})

    async def scenario() -> None:
        job = Job(spec, plan, SHAPE, unlimited(plan))
        for worker in job.running["train"]:
            worker.resident = {PARAMS, GRADS, OPTIMIZER, OTHER}
        await device_sharing.release_devices(spec, [plan.component("train")], job.running, 60.0)
        assert [worker.resident for worker in job.running["train"]] == [{PARAMS}, {PARAMS}]

    run_virtual(scenario())


def test_work_with_some_kinds_needs_room_for_that_work_alone() -> None:
    """A trainer that hands its weights out has no activations: an engine's weights fit beside it, though not while it trains."""

    async def scenario() -> None:
        model = Memory({D0: 20})
        arbiter = DeviceArbiter(model.budget_bytes)
        for name, sizes, more in (
            ("trainer", {PARAMS: 4, OPTIMIZER: 4}, {"working": 12, "partial": 2}),
            ("engine", {PARAMS: 8, KV: 6}, {"rederivable": [PARAMS]}),
        ):
            client, _ = make_client(model, name, (D0,), sizes, resident=(), **more)
            arbiter.add(client, resident=())

        def there() -> int:
            return sum(process.num_bytes for process in arbiter.residency()[0].processes)

        async with arbiter.use("trainer", what="training", timeout_s=99, owner="driver"):
            assert there() == 4 + 4 + 12
        async with (
            arbiter.use("trainer", (PARAMS,), what="sync", timeout_s=99, owner="driver"),
            arbiter.use("engine", (PARAMS,), what="sync", timeout_s=99, owner="driver", writes=(PARAMS,)),
        ):
            assert there() == 4 + 4 + 2 + 8
            with pytest.raises(NoRoomError, match="trainer work 10 B"):
                async with arbiter.use("trainer", what="training", timeout_s=99, owner="driver"):
                    pass
        assert not model.over
        await arbiter.settle()

    run_virtual(scenario())


# What validation accepts finds room -----------------------------------------------------------------------------------------------

POLICIES = st.sampled_from(["Auto", "Always", "Never"])
RANKS = st.sampled_from(["0", "0-1", "0-2", "1-2", "2", "all"])


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Jobs whose components share devices in any way."""
    switching = draw(st.booleans())

    def offload(*fields: str) -> dict[str, Any]:
        return {field: draw(POLICIES) for field in fields} if switching else {}

    tensor = draw(st.sampled_from([1, 1, 2]))
    train = component("train", "Trainer", draw(RANKS), offload=offload("optimizer", "weight", "grad"))
    engine: dict[str, Any] = {"tensorParallelSize": tensor, "kvCacheBytes": draw(st.sampled_from([8 * GIB, 64 * GIB]))}
    infer = component("infer", "Rollout", draw(st.sampled_from(["0-1", "2-3", "all"])), offload=offload("weight", "kvCache"), engine=engine)
    others = [component("ref", "Reference", draw(RANKS), offload=offload("weight"))] if draw(st.booleans()) else []
    made = document(
        train,
        infer,
        *others,
        group={**CUDA, "deviceType": draw(st.sampled_from(["CUDA", "CPU"]))},
        offload={"residency": "Switching" if switching else "Resident"},
        rollout={
            "promptsPerStep": draw(st.sampled_from([12, 120])),
            "samplesPerPrompt": 2,
            "maxResponseTokens": draw(st.integers(16, 4096)),
        },
        training={"activationCheckpointing": draw(st.booleans()), "microBatchTokens": draw(st.sampled_from([1024, 65536]))},
    )
    made["spec"]["weightSync"] = {"bucketBytes": draw(st.sampled_from([2**20, 2**33]))}
    return made


SHAPES = st.one_of(
    st.sampled_from([10**6, 10**9, 7 * 10**9]).map(memory.shape_from_count),
    st.sampled_from(sorted(CONFIGS)).map(lambda name: memory.shape_from_config(CONFIGS[name])),
)


def tightest(made: dict[str, Any], shape: memory.ModelShape) -> None:
    """Give the devices exactly what the estimate says that the fullest one needs."""
    made["spec"]["nodeGroups"][0]["deviceMemory"] = str(1 << 60)
    for _ in range(2):  # an engine sets less aside on a smaller device
        spec, plan = planned(made)
        pools = [pool for pool in memory.estimate(spec, plan, shape).pools if pool.kind is memory.PoolKind.DEVICE]
        made["spec"]["nodeGroups"][0]["deviceMemory"] = str(max(pool.peak.num_bytes for pool in pools))


def without_idle_policies(made: dict[str, Any]) -> None:
    """Remove what validation refuses because it decides nothing."""
    _, plan = planned(made)
    for written in made["spec"]["components"]:
        if written["role"] == "Reward" or not plan.component(written["name"]).shares_devices_with:
            written.pop("offload", None)
    if not any(c.shares_devices_with for c in plan.components):
        made["spec"]["offload"] = {}
    if plan.mode is PlacementMode.PARTIAL:
        made["spec"]["overlap"] = {"asyncGenerationRatio": 1}


def checked_or_paths(made: dict[str, Any], shape: memory.ModelShape) -> tuple[CheckedJob | None, set[str]]:
    """The job, or where its problems are."""
    try:
        return check(made, runnable=False, shape_of=lambda spec: shape), set()
    except SpecInvalidError as error:
        return None, {problem.path for problem in error.errors}


@given(jobs(), SHAPES)
@settings(max_examples=120, deadline=None)
def test_what_validation_accepts_finds_room(made: dict[str, Any], shape: memory.ModelShape) -> None:
    """On devices without a byte to spare: no NoRoomError, and the workers never have more than there is."""
    without_idle_policies(made)
    tightest(made, shape)
    checked, refused = checked_or_paths(made, shape)
    event(f"refused: {', '.join(sorted(refused))}" if checked is None else f"{checked.job.spec.offload.residency}, {checked.plan.mode}")
    assert not any(path.endswith("deviceMemory") for path in refused)
    if checked is None:
        return
    spec, plan = checked.job.spec, checked.plan
    (group,) = spec.node_groups
    budgets = {device: int(group.device_memory or 0) for device in unlimited(plan)}

    async def scenario() -> Iterable[str]:
        job = Job(spec, plan, shape, budgets)
        await job.steps(2)
        return job.memory.over

    assert run_virtual(scenario()) == []


def test_where_a_teacher_of_unknown_size_is_everything_idle_leaves() -> None:
    teacher = component("teacher", "Teacher", "1", model={"path": "models/teacher"})
    spec, plan = planned(
        document(component("train", "Trainer", "0-1"), component("infer", "Rollout", "2-3"), teacher, offload={"residency": "Switching"})
    )
    budgets = device_sharing.device_budgets(spec, plan, SHAPE, {})
    assert {device.local_index for device, size in budgets.items() if size == device_sharing.UNKNOWN_BYTES} == {1}
    sizes = device_sharing.process_sizes(spec, plan, SHAPE, {})
    by_name = {c.name: c for c in plan.components}
    assert sizes(by_name["teacher"], by_name["teacher"].processes[0]) is None
    assert sizes(by_name["train"], by_name["train"].processes[0]) is not None
    assert [use.releases_kinds for use in use_of(spec, plan, "teacher")] == [(OTHER, PARAMS)]


def test_a_judge_of_known_size_leaves_its_device_with_weights_and_cache() -> None:
    grader = component("grader", "Judge", "0", model={"path": "models/grader", "parameterCount": 2 * 10**9})
    train, infer = component("train", "Trainer", "0-1"), component("infer", "Rollout", "2-3")
    spec, plan = planned(document(train, infer, grader, offload={"residency": "Switching"}))
    served = memory.served_shapes(spec)
    budgets = device_sharing.device_budgets(spec, plan, SHAPE, served)
    assert device_sharing.UNKNOWN_BYTES not in budgets.values()
    judge = plan.component("grader")
    sizes = device_sharing.process_sizes(spec, plan, SHAPE, served)(judge, judge.processes[0])
    assert sizes is not None
    assert sizes.size_bytes == {PARAMS: 4 * 10**9}
    left = sizes.working_bytes + sizes.size_bytes[PARAMS] + sizes.fixed_bytes
    assert left == int(0.8 * budgets[D0]), "with its cache it fills what memoryFraction gives it"
