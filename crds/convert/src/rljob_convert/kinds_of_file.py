"""What a file is, before it is converted: an RL job, or something that must not become one."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.errors import FieldError, SpecInvalidError, show
from rljob_convert.source import Source

_JOB_KEYS = {
    "roll": (
        "actor_train",
        "actor_infer",
        "student_train",
        "pretrain",
        "rewards",
        "rollout_batch_size",
        "num_return_sequences_in_group",
        "adv_estimator",
        "train_env_manager",
        "async_generation_ratio",
        "ppo_epochs",
        "init_kl_coef",
        "use_kl_loss",
        "prompt_length",
        "response_length",
        "exp_name",
    ),
    "rlinf": ("cluster", "runner", "algorithm", "actor", "rollout"),
}
"""A job of the framework has one of these at the top; what has none is something else, whatever else it has."""
_ROLL_SECTIONS: Mapping[str, str] = {
    "sft_train": "supervised fine-tuning (SFT)",
    "student": "distillation from a teacher's own texts",
    "student_pretrain": "distillation from a teacher's own texts",
    "chosen_key": "preference optimization (DPO)",
    "rejected_key": "preference optimization (DPO)",
    "reward_train": "reward-model training",
    "services": "a docker-compose file",
}
_RLINF_TASKS: Mapping[str, str] = {
    "sft": "supervised training of a policy, a reward model or a value model",
    "offline": "offline training on recorded data",
}
_EMBODIED = ("embodied", "embodied_eval")
"""RLinf's tasks of everything that acts in an environment of its own: robots, simulators, and generators whose images are scored."""
TASKS = ("reasoning", "reasoning_eval", "coding_online_rl", "math")
"""RLinf's tasks of language models; ``math`` is what its documentation calls ``reasoning``."""
_GENERATORS = ("sd3", "wan22_ti2v_5b")
_POLICIES = (
    "openvla",
    "openvla_oft",
    "molmoact2",
    "openpi",
    "openpi_rlinf",
    "starvla",
    "mlp_policy",
    "rlt_mlp_policy",
    "rlt_td3_mlp_policy",
    "gr00t",
    "gr00t_n1d6",
    "gr00t_n1d7",
    "dexbotic_pi",
    "dexbotic_dm0",
    "dreamzero",
    "cnn_policy",
    "flow_policy",
    "cma",
    "lingbotvla",
    "abot_m0",
    "evo1",
)
"""RLinf's types of models that are no language models (``DIFFUSION_MODELS`` and ``EMBODIED_MODEL`` of its config.py): what a file trains
says what it is, its placement does not."""
_REMEDY = "RLJob trains with reinforcement learning only; give an RL configuration"
_TEXT_REMEDY = (
    "RLJob trains language models on text; robots, simulators, vision-language-action models and generators of images or videos are not "
    "planned: give a configuration of a language model, or keep RLinf for this one"
)


def refuse_what_is_no_job(source: Source, framework: str) -> None:
    """Raise where a file describes no RL job of the framework.

    Raises:
        SpecInvalidError: says what the file is.
    """
    if framework == "roll":
        for key, what in _ROLL_SECTIONS.items():
            if source.has(key):
                raise _refused((key,), None, f"makes this file {what}, no RL job", _REMEDY)
    elif source.has("services") and not source.has("cluster"):
        raise _refused(("services",), None, "makes this file a docker-compose file, no RL job", _REMEDY)
    if not any(source.has(key) for key in _JOB_KEYS[framework]):
        keys = ", ".join(source.keys()[:6]) or "nothing"
        wanted = ", ".join(_JOB_KEYS[framework][:5])
        problem = f"describes no job: it has {keys}, and none of {wanted}"
        raise SpecInvalidError(
            [FieldError(path="", problem=f"the file {problem}", remedy="give the file that is started, not one it is made of")]
        )
    if framework == "rlinf":
        _refuse_rlinf_task(source)


def _refuse_rlinf_task(source: Source) -> None:
    where = ("runner", "task_type")
    task = source.peek(*where)
    if isinstance(task, str) and task in _RLINF_TASKS:
        raise _refused(where, task, f"makes this file {_RLINF_TASKS[task]}, no RL job", _REMEDY)
    _refuse_what_is_no_language_model(source)
    if task is not None and task not in TASKS:
        raise _refused(where, task, "is not a task of RLinf", f"use one of {', '.join(TASKS[:-1])}")


def _refuse_what_is_no_language_model(source: Source) -> None:
    """Raise where RLinf would train or evaluate a robot's policy or a generator: by the task, the model's type, the environment's type.

    All types of environments that RLinf has are robots, simulators or ``diffusion``. A file of placements alone says none of these.
    """
    models = [(*parts, "model", "model_type") for parts in (("actor",), ("rollout",))]
    environments = [("env", part, key) for part in ("train", "eval") for key in ("env_type", "simulator_type")]
    model = next(((parts, source.peek(*parts)) for parts in models if source.peek(*parts) in (*_POLICIES, *_GENERATORS)), None)
    environment = next(((parts, source.peek(*parts)) for parts in environments if source.has(*parts)), None)
    task = ("runner", "task_type")
    where = task if source.peek(*task) in _EMBODIED else model[0] if model else environment[0] if environment else None
    if where is None:
        return
    found = {"model": model and model[1], "environment": environment and environment[1]}
    generates = found["model"] in _GENERATORS or found["environment"] == "diffusion"
    what = "RL of a generator of images or videos" if generates else "a job of robots or simulators"
    details = ", ".join(f"{name} {value}" for name, value in found.items() if value)
    problem = f"makes this file {what}{f' ({details})' if details else ''}, which RLJob does not run"
    raise _refused(where, source.peek(*where), problem, _TEXT_REMEDY)


def _refused(where: tuple[str, ...], value: object, problem: str, remedy: str) -> SpecInvalidError:
    shown = None if value is None else show(value)
    return SpecInvalidError([FieldError(path=".".join(where), value=shown, problem=problem, remedy=remedy)])
