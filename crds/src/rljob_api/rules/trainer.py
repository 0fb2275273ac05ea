"""Rules about the trainer: how a step's samples are divided over updates and processes, and how long it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.plan import Plan
from rljob_api.roles import TRAITS
from rljob_api.rules.model import parallel_path
from rljob_api.v1alpha1.learning import Training
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import LayerCompilation, Schedule


def _mini_batches(spec: RLJobSpec) -> Iterator[FieldError]:
    prompts, mini_batches = spec.rollout.prompts_per_step, spec.training.mini_batches
    if prompts % mini_batches:
        yield _error(
            "spec.rollout.promptsPerStep",
            prompts,
            f"is not a multiple of training.miniBatches ({mini_batches})",
            f"use {_near(prompts, mini_batches)} prompts, or a divisor of {prompts} for miniBatches",
        )


def _schedule(spec: RLJobSpec) -> Iterator[FieldError]:
    steps, alone = spec.training.steps, spec.algorithm.critic.warmup_steps
    if spec.validates_only:
        return
    described = f"training.steps ({steps})" + (f" less algorithm.critic.warmupSteps ({alone})" if alone else "")
    yield from _warmup(spec.training, "spec.training.warmupSteps", steps - alone, described)
    yield from _min_learning_rate(spec.training, "spec.training.minLearningRate", "training")


def _warmup(training: Training, path: str, own: int, described: str) -> Iterator[FieldError]:
    """Of ``own`` steps; ``described`` says what they are."""
    warmup = training.warmup_steps
    if warmup > own >= 0:
        problem = f"is more than {described}, so the peak learning rate is never reached"
        yield _error(path, warmup, problem, f"use at most {own}")
    elif warmup == own > 0 and training.schedule is not Schedule.CONSTANT:
        problem = f"leaves no step of {described} to the schedule {training.schedule}"
        yield _error(path, warmup, problem, f"use at most {own - 1}, or schedule: Constant")


def _min_learning_rate(training: Training, path: str, section: str) -> Iterator[FieldError]:
    """The end of a schedule lies below its peak, and a constant rate has none."""
    smallest, peak = training.min_learning_rate, training.learning_rate
    if smallest and training.schedule is Schedule.CONSTANT:
        problem = "has no effect with schedule Constant, which stays at learningRate"
        yield _error(path, smallest, problem, "remove it, or write schedule: Linear or Cosine")
    elif smallest > peak:
        yield _error(path, smallest, f"is above {section}.learningRate ({peak:g}), where the schedule begins", f"use at most {peak:g}")


def _critic_schedule(spec: RLJobSpec) -> Iterator[FieldError]:
    """What the critic's own settings make of those that it takes over."""
    critic, steps, path = spec.algorithm.critic, spec.training.steps, "spec.algorithm.critic"
    if spec.validates_only:
        return
    training = critic.over(spec.training)
    if critic.learning_rate_warmup_steps is not None or critic.schedule is not None:
        yield from _warmup(training, f"{path}.learningRateWarmupSteps", steps, f"training.steps ({steps})")
    yield from _min_learning_rate(training, f"{path}.minLearningRate", "algorithm.critic")


def _critic_warmup(spec: RLJobSpec) -> Iterator[FieldError]:
    warmup, steps = spec.algorithm.critic.warmup_steps, spec.training.steps
    if warmup >= steps > 0:
        problem = f"leaves none of training.steps ({steps}) to train the policy"
        yield _error("spec.algorithm.critic.warmupSteps", warmup, problem, f"use at most {steps - 1}")


def _data_parallel(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Every data-parallel process must get as many samples of a mini-batch as the others."""
    prompts, samples, mini_batches = spec.rollout.prompts_per_step, spec.rollout.samples_per_prompt, spec.training.mini_batches
    for placed, component in zip(spec.components, plan.components, strict=True):
        if not TRAITS[component.role].is_trained:
            continue
        shared_by = spec.processes_per_share(placed)
        if component.world_size % shared_by or prompts % mini_batches:
            continue
        processes, in_mini_batch = component.world_size // shared_by, prompts // mini_batches * samples
        if in_mini_batch % processes:
            yield _error(
                "spec.rollout.samplesPerPrompt",
                samples,
                f"a mini-batch has promptsPerStep {prompts} / miniBatches {mini_batches} * samplesPerPrompt {samples} = {in_mini_batch} "
                f"samples, which the {processes} data-parallel processes of {component.name} do not divide",
                f"use {_near_samples(prompts // mini_batches, samples, processes)} samples per prompt, or change promptsPerStep",
            )


def _parallel_sizes(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    for index, component in enumerate(plan.components):
        tensor, processes = spec.tensor_parallel_size(spec.components[index]), component.world_size
        takes_size = TRAITS[component.role].divides_layers
        devices = f"the {processes} device{'s' if processes > 1 else ''} of {component.name}"
        if takes_size and processes % tensor:
            yield _error(
                parallel_path(spec, index, "tensor"),
                tensor,
                f"does not divide {devices}",
                f"use a divisor of {processes}, or {_near(processes, tensor)} devices",
            )
            continue
        together = spec.processes_per_share(spec.components[index])
        if takes_size and processes % together:
            groups = devices if tensor == 1 else f"the {processes // tensor} groups of tensorParallelSize {tensor} in {devices}"
            yield _error(
                parallel_path(spec, index, "context"),
                together // tensor,
                f"does not divide {groups}",
                f"use a divisor of {processes // tensor}, or {_near(processes, together)} devices",
            )


def _expert_groups(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Groups of processes that have a part each of the experts: neighbors, whatever else they share."""
    for index, component in enumerate(plan.components):
        placed = spec.components[index]
        experts, processes = spec.expert_parallel_size(placed), component.world_size
        if TRAITS[component.role].divides_layers and processes % experts:
            devices = f"the {processes} device{'s' if processes > 1 else ''} of {component.name}"
            remedy = f"use a divisor of {processes}, or {_near(processes, experts)} devices"
            yield _error(parallel_path(spec, index, "expert"), experts, f"does not divide {devices}", remedy)


def _sequence_parallel(spec: RLJobSpec) -> Iterator[FieldError]:
    """Tokens are divided over the devices that divide layers."""
    if spec.training.sequence_parallel and spec.training.tensor_parallel_size == 1:
        problem = "is set with training.tensorParallelSize 1, so there are no devices to divide tokens over"
        yield _error("spec.training.sequenceParallel", True, problem, "remove it, or set tensorParallelSize above 1")


def _context_parallel(spec: RLJobSpec) -> Iterator[FieldError]:
    """Sequences are divided where packed rows are computed (``rljob_runtime.training.attention``)."""
    attention = spec.model.attention
    for index, component in enumerate(spec.components):
        size = spec.context_parallel_size(component)
        if size > 1 and attention != "sdpa" and TRAITS[component.role].divides_layers:
            problem = f"is set with model.attention {attention}, which takes whole sequences"
            yield _error(parallel_path(spec, index, "context"), size, problem, "write 1, or model.attention: sdpa")


def _near(value: int, multiple_of: int) -> str:
    """The nearest positive multiples, for example "24 or 32"."""
    low = value // multiple_of * multiple_of
    return f"{low} or {low + multiple_of}" if low else str(multiple_of)


def _near_samples(prompts: int, samples: int, processes: int) -> str:
    """The samples per prompt nearest to ``samples`` for which the processes divide the mini-batch."""
    fitting = [count for count in range(1, samples + processes + 1) if prompts * count % processes == 0]
    below = [count for count in fitting if count < samples][-1:]
    above = [count for count in fitting if count > samples][:1]
    return " or ".join(str(count) for count in below + above)


def _layer_compilation(spec: RLJobSpec) -> Iterator[FieldError]:
    """Divided layers are not compiled, see :mod:`rljob_api.layer_compilation`."""
    wanted = spec.training.layer_compilation
    if wanted is not LayerCompilation.ENABLED:
        return
    for component in spec.components:
        if TRAITS[component.role].divides_layers and (tensor := spec.tensor_parallel_size(component)) > 1:
            problem = f"contradicts the tensorParallelSize {tensor} of {component.name}: divided layers are not compiled"
            yield _error("spec.training.layerCompilation", wanted, problem, "use Auto, or tensorParallelSize 1")


def _router_bias(spec: RLJobSpec) -> Iterator[FieldError]:
    """Adapters leave the rest of the model as it is, which a reference without them computes."""
    rate = spec.training.router_bias_update_rate
    if rate > 0 and spec.model.lora is not None:
        problem = "moves biases of routers, and with model.lora only adapters are trained"
        yield _error("spec.training.routerBiasUpdateRate", rate, problem, "remove it, or remove model.lora")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _mini_batches,
    _layer_compilation,
    _schedule,
    _critic_schedule,
    _critic_warmup,
    _sequence_parallel,
    _context_parallel,
    _router_bias,
)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_data_parallel, _parallel_sizes, _expert_groups)
"""Rules that need to know how many processes there are."""
