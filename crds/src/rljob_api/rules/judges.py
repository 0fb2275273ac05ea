"""Rules about judges and reward models: what they are asked, how their words are read, and where their key is from."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping

from rljob_api import paths
from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.environment import device_type, node_group
from rljob_api.planning.plan import Plan
from rljob_api.rules.pods import environments
from rljob_api.rules.secret_names import looks_secret
from rljob_api.v1alpha1.components import Engine, Role
from rljob_api.v1alpha1.data import Reward
from rljob_api.v1alpha1.judges import Judge, JudgeEndpoint, JudgeParser, RewardModel
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import RewardType

PLACEHOLDERS = ("question", "prompt", "response", "answer")
_OWN_FIELDS = ("model", "messages", "stream", "stream_options", "n", "tools", "tool_choice")
_OWN_FIELDS_OF_CLASSIFY = ("model", "messages", "input", "use_activation")
"""Of a request; RLJob sets them, or could not read what comes back."""

_SERVER_ARGUMENTS = frozenset(
    {
        *("model", "served_model_name", "revision", "trust_remote_code", "dtype", "seed", "host", "port", "api_key"),
        *("tensor_parallel_size", "pipeline_parallel_size", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization"),
        *("enable_prefix_caching", "enforce_eager", "runner", "convert"),
    }
)
"""Of vLLM's server; fields of the component say them."""


def _judges(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, reward in enumerate(spec.rewards):
        path = f"spec.rewards[{index}]"
        yield from _belongs(reward, path)
        if reward.type is RewardType.LLM_JUDGE and reward.judge is not None:
            yield from _template(reward.judge.template, f"{path}.judge.template")
            yield from _parser(reward, reward.judge.parser, f"{path}.judge.parser")
            yield from _request(reward.judge, reward.judge.sampling, _OWN_FIELDS, f"{path}.judge", "sampling")
            yield from _asked(spec, reward.judge, f"{path}.judge")
        elif reward.type is RewardType.REWARD_MODEL and (model := reward.reward_model) is not None:
            if model.template:
                yield from _template(model.template, f"{path}.rewardModel.template")
            yield from _request(model, model.request, _OWN_FIELDS_OF_CLASSIFY, f"{path}.rewardModel", "request")
            yield from _asked(spec, model, f"{path}.rewardModel")
            if reward.parameters:
                yield _error(f"{path}.parameters", None, "has no effect, a reward model takes no parameters", "write rewardModel.request")
    yield from _components(spec)


def _belongs(reward: Reward, path: str) -> Iterator[FieldError]:
    """Each type has the section that describes its model."""
    sections = (
        (RewardType.LLM_JUDGE, "judge", reward.judge, "{endpoint, template, parser}"),
        (RewardType.REWARD_MODEL, "rewardModel", reward.reward_model, "{endpoint} or {component}"),
    )
    for kind, field, section, added in sections:
        if reward.type is kind and section is None:
            yield _error(path, None, f"has type {kind} but no {field}", f"add {field}: {added}")
        elif reward.type is not kind and section is not None:
            problem = f"belongs to type {kind}, the type is {reward.type}"
            yield _error(f"{path}.{field}", None, problem, f"remove it or write type: {kind}")


def scores_by_class(spec: RLJobSpec, component: str) -> bool:
    """Whether a Judge component serves a classification model: rewards of type RewardModel ask it."""
    return any(reward.reward_model is not None and reward.reward_model.component == component for reward in spec.rewards)


def _components(spec: RLJobSpec) -> Iterator[FieldError]:
    """Every Judge is asked, as one kind of model."""
    judged = {reward.judge.component for reward in spec.rewards if reward.judge is not None}
    for index, component in spec.with_role(Role.JUDGE):
        path, classifies = f"spec.components[{index}]", scores_by_class(spec, component.name)
        if component.name not in judged and not classifies:
            remedy = f"write component: {component.name} in the judge or rewardModel of a reward, or remove it"
            yield _error(path, None, f"{component.name} is a Judge that no reward asks", remedy)
        elif component.name in judged and classifies:
            problem = f"{component.name} is asked by rewards of both types, and a server either answers or classifies"
            yield _error(path, None, problem, "add a second Judge component for the RewardModel")


def _servers(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component in spec.with_role(Role.JUDGE):
        path = f"spec.components[{index}].engine.extraArgs"
        for name, value in component.engine.extra_args.items() if component.engine is not None else ():
            if name in _SERVER_ARGUMENTS:
                remedy = "write the field of engine or model instead" if name not in ("host", "port", "api_key") else "remove it"
                yield _error(f"{path}.{name}", value, "is set by RLJob itself", remedy)


def _asked(spec: RLJobSpec, judge: Judge | RewardModel, path: str) -> Iterator[FieldError]:
    if (judge.endpoint is None) == (judge.component is None):
        problem = "has neither endpoint nor component" if judge.endpoint is None else "has both endpoint and component"
        yield _error(path, None, problem, "give exactly one of them")
    elif judge.endpoint is not None:
        yield from _endpoint(spec, judge.endpoint, f"{path}.endpoint")
    else:
        judges = [component.name for _, component in spec.with_role(Role.JUDGE)]
        if judge.component not in judges:
            known = f"write {' or '.join(judges)}" if judges else "add one with placement, engine and model"
            yield _error(f"{path}.component", judge.component, "is not a component with role Judge", known)


def _template(template: str, path: str) -> Iterator[FieldError]:
    """A Python format string with plain fields."""
    shown = template if len(template) <= 60 else f"{template[:60]}..."
    try:
        fields = [piece[1:] for piece in string.Formatter().parse(template) if piece[1] is not None]
    except ValueError as error:
        yield _error(path, shown, f"is not a template: {error}", "write literal braces as {{ and }}")
        return
    if ("response", "", None) not in fields:
        yield _error(path, shown, "does not contain {response}", "put {response} where the response belongs")
    for name, form, conversion in fields:
        if name not in PLACEHOLDERS or form or conversion:
            problem = f"contains the placeholder {{{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}}}"
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            yield _error(path, shown, problem, f"only {known} are filled in; write literal braces as {{{{ and }}}}")


def _parser(reward: Reward, parser: JudgeParser, path: str) -> Iterator[FieldError]:
    given = [name for name in ("pattern", "field", "function") if getattr(parser, name) is not None]
    if len(given) != 1:
        problem = f"has {' and '.join(given) or 'none of pattern, field and function'}"
        yield _error(path, None, problem, "give exactly one of pattern, field and function")
    if parser.function is not None:
        for name in ("values", "minimum", "maximum", "otherwise"):
            if getattr(parser, name) not in (None, {}):
                yield _error(f"{path}.{name}", getattr(parser, name), "has no effect, the function returns the score", "remove it")
    elif reward.parameters:
        problem = "has no effect, only parser.function takes parameters"
        yield _error(f"{path.removesuffix('.judge.parser')}.parameters", None, problem, "remove it")
    if parser.pattern is not None:
        yield from _pattern(parser.pattern, f"{path}.pattern")
    yield from _scores(parser, path)


def _scores(parser: JudgeParser, path: str) -> Iterator[FieldError]:
    """Bounds are those of numbers that the judge says; words have the scores that are given them, whatever their case."""
    low, high = parser.minimum, parser.maximum
    if parser.values and parser.function is None:
        for field, bound in (("minimum", low), ("maximum", high)):
            if bound is not None:
                problem = "has no effect with values, which say the score of every word"
                yield _error(f"{path}.{field}", bound, problem, "remove it, or remove values for a judge that says numbers")
    elif low is not None and high is not None and low > high:
        yield _error(f"{path}.minimum", low, f"is above maximum, {high:g}, so that every score is an error", "exchange them")
    elif low is not None and low == high:
        problem = "is as large as maximum, so that any other score is an error, and nothing is learned"
        yield _error(f"{path}.minimum", low, problem, "write a smaller one, or a larger maximum")
    first: dict[str, str] = {}
    for word in parser.values:
        same = first.setdefault(word.strip().casefold(), word)
        if same != word:
            problem = f"is the word {same!r} once more: neither case nor blanks around it count"
            yield _error(paths.join((*paths.split(path), "values", word)), parser.values[word], problem, "remove one of them")


def _pattern(pattern: str, path: str) -> Iterator[FieldError]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield _error(path, pattern, f"is not a regular expression: {error}", "correct it, see Python's re")
        return
    if groups > 1:
        yield _error(path, pattern, f"has {groups} groups", "keep one around the score, and write the others as (?:...)")


def _request(judge: Judge | RewardModel, given: Mapping[str, object], own: Iterable[str], path: str, section: str) -> Iterator[FieldError]:
    for name in own:
        if name in given:
            yield _error(f"{path}.{section}.{name}", given[name], "is set by the system", "remove it")
    retries = judge.retries
    if retries.max_backoff_seconds < retries.min_backoff_seconds:
        problem = f"is below minBackoffSeconds, {retries.min_backoff_seconds:g}"
        yield _error(f"{path}.retries.maxBackoffSeconds", retries.max_backoff_seconds, problem, "write the larger one here")


def _endpoint(spec: RLJobSpec, endpoint: JudgeEndpoint, path: str) -> Iterator[FieldError]:
    """A literal key would be shown to everyone who may read the job, whatever its variable is called; messages never show it."""
    if "@" in endpoint.url.split("/")[2]:
        problem = "names a user, and everyone who may read the job reads the password beside it"
        yield _error(f"{path}.url", None, problem, "remove it, and name the variable of an API key in apiKeyEnv")
    name = endpoint.api_key_env
    for where, env in environments(spec) if name is not None else ():
        for index, variable in enumerate(env):
            if variable.name == name and variable.value and not looks_secret(name):  # one that looks so is refused in any case
                problem = f"{name} is a judge's API key, and a literal value is shown to everyone who may read the job"
                remedy = f"put it into a Secret and write valueFrom: {{secretKeyRef: {{name: my-secret, key: {name}}}}}"
                yield _error(f"{where}[{index}].value", None, problem, remedy)


def _shares(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Each reward process has a share of the limits."""
    processes = sum(component.world_size for component in plan.with_role(Role.REWARD))
    for index, reward in enumerate(spec.rewards):
        if (asked := reward.asked) is None:
            continue
        path = f"spec.rewards[{index}].{'judge' if reward.judge is not None else 'rewardModel'}"
        for field, value in (("limits.inFlight", asked.limits.in_flight), ("budget.calls", asked.budget.calls)):
            if value is not None and value < processes:
                problem = f"is less than the {processes} reward processes, each of which has a share"
                yield _error(f"{path}.{field}", value, problem, "raise it, or use fewer workers of the Reward components")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_judges, _servers)
"""Rules between fields, each independent of the others."""


def _together(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Judges that share an accelerator are on it at the same time: a response is scored by all of them."""
    on: dict[int, list[tuple[int, float]]] = {}
    for index, component in spec.with_role(Role.JUDGE):
        engine = component.engine or Engine()
        for process in plan.components[index].processes:
            if engine.kv_cache_bytes is None and device_type(node_group(spec, plan, process)) is not DeviceType.CPU:
                for device in process.devices:
                    on.setdefault(device, []).append((index, engine.memory_fraction))
    reported: set[int] = set()
    for sharing in on.values():
        total, (index, fraction) = sum(fraction for _, fraction in sharing), sharing[-1]
        if total > 1 and index not in reported:
            reported.add(index)
            names = " and ".join(spec.components[i].name for i, _ in sharing)
            problem = f"is too much: {names} score at the same time on the same devices, and take {total:.2f} of their memory together"
            remedy = f"write {0.9 / len(sharing):.2f} or less for each, or place them on different devices"
            yield _error(f"spec.components[{index}].engine.memoryFraction", fraction, problem, remedy)


PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_shares, _together)
"""Rules that need to know how many processes there are."""
