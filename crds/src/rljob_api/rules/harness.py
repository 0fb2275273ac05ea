"""Rules about agent programs, environments of type Harness: what they need, and what has no meaning for them."""

from __future__ import annotations

from collections.abc import Iterator

from rljob_api import naming
from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.rules.secret_names import looks_secret
from rljob_api.v1alpha1.environments import Environment
from rljob_api.v1alpha1.pods import EnvVar
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import AdvantageEstimator, EnvironmentType

_OF_ENVIRONMENTS = {
    "parameters": "a program has its settings in harness.command and harness.env",
    "processes": "a program starts processes in any case",
    "episodes_per_process": "each episode has a program of its own",
    "prompt": "a program writes its prompts itself",
}
"""Fields that type Harness does not have, and why."""
_GIVEN = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
TURN_ESTIMATORS = (AdvantageEstimator.GIGPO, AdvantageEstimator.STEP_REINFORCE)
"""They give each turn an advantage of its own."""


def harness_problems(spec: RLJobSpec, environment: Environment, path: str) -> Iterator[FieldError]:
    """What is wrong with one environment as far as programs go."""
    if environment.type != EnvironmentType.HARNESS:
        if environment.harness is not None:
            yield _error(
                f"{path}.harness", None, f"is for type Harness, the type is {environment.type}", "remove it, or write type: Harness"
            )
        return
    if environment.harness is None:
        remedy = "add it, for example harness: {command: [python, my_agent.py]}"
        yield _error(f"{path}.harness", None, "is missing, and type Harness has its episodes played by a program", remedy)
    else:
        for index, variable in enumerate(environment.harness.env):
            yield from _variable(variable, f"{path}.harness.env[{index}]")
    for name, why in _OF_ENVIRONMENTS.items():
        field, value = Environment.model_fields[name], getattr(environment, name)
        if value != field.default:
            yield _error(f"{path}.{field.alias}", None, f"has no effect with type Harness: {why}", "remove it")
    if environment.rewards.format_penalty:
        problem = "has no effect with type Harness: the program gives the reward"
        yield _error(f"{path}.rewards.formatPenalty", environment.rewards.format_penalty, problem, "remove it")
    estimator = spec.algorithm.advantage.estimator
    if estimator in TURN_ESTIMATORS:
        problem = f"{estimator} needs a reward and a state for each turn, and a program gives one reward for an episode"
        yield _error(f"{path}.type", environment.type, problem, "write algorithm.advantage.estimator: GRPO")


def _variable(variable: EnvVar, path: str) -> Iterator[FieldError]:
    name = variable.name
    if name in _GIVEN or name.startswith(naming.RESERVED_ENV_PREFIX):
        yield _error(f"{path}.name", name, "is set by RLJob for each episode", "remove it, or choose another name")
    if variable.value_from is not None:
        problem = f"{name} cannot come from elsewhere: a program may run what the model writes, and is given literal values only"
        yield _error(f"{path}.valueFrom", None, problem, "write value, or let a service outside the job hold a secret")
    elif variable.value is None:
        yield _error(path, None, f"{name} has no value", 'add one; value: "" makes it empty')
    elif variable.value and looks_secret(name):
        problem = f"{name} looks like a secret, and a program may run what the model writes"
        yield _error(f"{path}.value", None, problem, "let a service outside the job hold it")
