"""What a file is, before it is converted: an RL job, or something that must not become one."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.errors import FieldError, SpecInvalidError, show
from rljob_convert.source import Source

_JOB_KEYS = {
    "roll": (
        "actor_train",
        "actor_infer",
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
_TRAINS = ("algorithm", "actor", "rollout")
_ROLL_SECTIONS: Mapping[str, str] = {
    "sft_train": "supervised fine-tuning (SFT)",
    "student_train": "on-policy distillation",
    "student_infer": "on-policy distillation",
    "student": "distillation",
    "student_pretrain": "distillation",
    "chosen_key": "preference optimization (DPO)",
    "rejected_key": "preference optimization (DPO)",
    "reward_train": "reward-model training",
    "services": "a docker-compose file",
}
_RLINF_TASKS: Mapping[str, str] = {
    "sft": "supervised training of a policy, a reward model or a value model",
    "offline": "offline training on recorded data",
}
TASKS = ("embodied", "embodied_eval", "reasoning", "reasoning_eval", "coding_online_rl", "math")
"""RLinf's tasks that are RL or evaluation; ``math`` is what its documentation calls ``reasoning``."""
_REMEDY = "RLJob trains with reinforcement learning only; give an RL configuration"


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
    if task is not None and task not in TASKS:
        raise _refused(where, task, "is no task that RLinf has", f"use one of {', '.join(TASKS[:-1])}")
    if str(task).startswith("embodied") and not any(source.has(key) for key in _TRAINS):
        raise _refused((), None, "the file trains and evaluates nothing: it has no algorithm, actor or rollout", _REMEDY)


def _refused(where: tuple[str, ...], value: object, problem: str, remedy: str) -> SpecInvalidError:
    shown = None if value is None else show(value)
    return SpecInvalidError([FieldError(path=".".join(where), value=shown, problem=problem, remedy=remedy)])
