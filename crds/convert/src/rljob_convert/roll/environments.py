"""ROLL configurations: the environments of an agentic job, which groups play them, what the policy reads, and their validation.

Facts about ROLL: ``roll/pipeline/agentic`` of its source (https://github.com/alibaba/ROLL, main of August 2026).
"""

from __future__ import annotations

from rljob_api import paths
from rljob_api.rules.environments import KEPT, OBSERVATIONS, OF_ONE_TURN, placeholders
from rljob_api.v1alpha1.environments import PARAMETERS
from rljob_api.vocabulary import EnvironmentType
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.roll.conversations import conversation
from rljob_convert.roll.learning import Batch
from rljob_convert.source import Source

TRAIN, VALIDATION = "train_env_manager", "val_env_manager"
_BUILT_IN = {"frozen_lake": EnvironmentType.FROZEN_LAKE, "sokoban": EnvironmentType.SOKOBAN}
_STEP_MANAGERS = {"StepEnvManager": "InvalidTurns", "StepConcatEnvManager": "Observations"}
"""Each of their turns is a prompt of its own; what it shows of those before."""
_TRAJECTORY_MANAGERS = ("TrajEnvManager",)
_MAX_TEXT = 4096


def environments(source: Source, numbers: Batch, *, validates: bool) -> list[Section]:
    """One entry for each tag that is trained, and, where the job validates, for each other one that is validated."""
    trained, validated = _shares(source, TRAIN), _shares(source, VALIDATION) if validates else {}
    if not trained and not source.has(TRAIN):
        first = source.keys("custom_envs")[:1]
        trained = dict.fromkeys(first, 1.0)
    result: list[Section] = []
    for tag in (*trained, *(tag for tag in validated if tag not in trained)):
        name = common.label(tag, "environment", (entry["name"] for entry in result))
        share = trained.get(tag, 0.0)
        shares = {"share": None if share == 1 else share, "validationShare": validated.get(tag)}
        result.append(compact({"name": name, **_environment(source, tag, shares, numbers)}))
    if not result:
        kind = source.assume(("custom_envs",), "FrozenLake", "an agentic job needs an environment", "describe yours in environments")
        result.append({"name": "environment", "type": kind})
    for tag in source.keys("custom_envs"):
        if tag not in (*trained, *validated) and ("custom_envs", tag) not in source.noted:
            source.drop(("custom_envs", tag), "no manager of the file names this tag")
    _note_groups(source, numbers)
    return result


def trained_names(source: Source) -> dict[str, str]:
    """What :func:`environments` calls the tags that are trained."""
    names: dict[str, str] = {}
    for index in range(source.length(TRAIN, "tags")):
        tag = str(source.peek(TRAIN, "tags", index))
        names.setdefault(tag, common.label(tag, "environment", names.values()))
    return names


def _shares(source: Source, manager: str) -> dict[str, float]:
    """Groups of each tag."""
    tags = source.texts(manager, "tags")
    groups = source.integer(manager, "num_env_groups", low=1)
    parts = [source.integer(manager, "num_groups_partition", i) for i in range(source.length(manager, "num_groups_partition"))]
    shares: dict[str, float] = {}
    for index, tag in enumerate(tags):
        given = parts[index] if index < len(parts) else None
        shares[tag] = shares.get(tag, 0.0) + (float(given) if given is not None else (groups or len(tags)) / len(tags))
    counted = [part for part in parts if part is not None]
    if counted and groups is not None and sum(counted) != groups:
        source.differs((manager, "num_groups_partition"), f"sums to {sum(counted)}, num_env_groups is {groups}; shares alone count here")
    if parts and len(parts) != len(tags):
        source.differs((manager, "num_groups_partition"), f"has {len(parts)} numbers for {len(tags)} tags", "check the shares")
    equal = len(set(shares.values())) == 1
    return {tag: 1.0 if equal else share for tag, share in shares.items() if share}


def _note_groups(source: Source, numbers: Batch) -> None:
    """How many groups play at one time follows from the batch and how far generation runs ahead."""
    groups = source.integer(TRAIN, "num_env_groups", low=1)
    if groups is not None and groups != numbers.prompts:
        why = f"RLJob plays as many groups at one time as a step has, {numbers.prompts}, and asyncGenerationRatio times as many more"
        source.differs((TRAIN, "num_env_groups"), why)


def _environment(source: Source, tag: str, shares: Section, numbers: Batch) -> Section:
    where = ("custom_envs", tag)
    kind = source.text(*where, "env_type", limit=256)
    if kind is None:
        kind = source.assume((*where, "env_type"), tag[:256], "the file does not describe this environment", "set environments[].type")
    gym = kind.removeprefix("rg:") if kind.startswith("rg:") else None
    built_in = EnvironmentType.REASONING_GYM if gym else _BUILT_IN.get(kind)
    tokens = source.integer(*where, "max_tokens_per_step", low=1, high=10_000_000)
    if tokens is not None and tokens > numbers.response_tokens:
        source.differs(
            (*where, "max_tokens_per_step"), f"{tokens} tokens are cut to {numbers.response_tokens}, which max_new_tokens allows"
        )
    talk = conversation(source, where, kind)
    if talk is not None:
        built_in, parameters = talk
    else:
        parameters = _parameters(source, (*where, "env_config"), built_in)
    penalty = _penalty(source, (*where, "env_config"))
    if gym:
        parameters = {"task": gym, **parameters}
    if talk is None and source.keys(*where, "tool_wrapper"):
        parameters["tool_wrapper"] = source.plain(*where, "tool_wrapper")
        source.differs((*where, "tool_wrapper"), "becomes a parameter: the environment has to offer its tools itself")
    return {
        "type": built_in.value if built_in is not None else _class_of(source, where, kind),
        **shares,
        "maxTurns": _turns(source, where),
        "maxTokensPerTurn": tokens if tokens is not None and tokens < numbers.response_tokens else None,
        "prompt": _prompt(source, where),
        "rewards": {"formatPenalty": penalty} if penalty else None,
        "parameters": parameters,
    }


def _class_of(source: Source, where: paths.Parts, kind: str) -> str:
    """A class to write, by the name of ROLL's environment."""
    path = common.environment_class(kind)
    why = f"RLJob has no environment like {kind} of its own"
    return source.assume((*where, "env_type"), path, why, "write this class, see environments[].type; env_config becomes its parameters")


def _turns(source: Source, where: paths.Parts) -> int | None:
    """ROLL counts in the manager and in the environment; whoever is first ends the episode."""
    counts = [source.integer(*where, *key, low=1, high=10_000) for key in (("max_steps",), ("env_config", "max_steps"))]
    given = [count for count in counts if count is not None]
    most = source.integer("max_actions_per_traj", low=1, high=10_000) if source.has("max_actions_per_traj") else None
    if not given:
        return most
    if len(set(given)) > 1:
        source.differs((*where, "max_steps"), f"env_config.max_steps is {counts[1]}; the smaller one ends an episode")
    return min(given)


def _penalty(source: Source, where: paths.Parts) -> float:
    """For actions that the environment does not understand."""
    penalty = source.number(*where, "format_penalty", low=-1e6, high=1e6) or 0.0
    if penalty > 0:
        source.differs((*where, "format_penalty"), "is left out: it would reward actions that the environment does not understand")
        penalty = 0.0
    return penalty


def _parameters(source: Source, where: paths.Parts, kind: EnvironmentType | None) -> Section:
    """What the environment gets."""
    known = None if kind is None else PARAMETERS[kind].model_fields
    result: Section = {}
    for key in source.keys(*where):
        at = (*where, key)
        if key == "format_penalty" or (key == "max_steps" and kind is EnvironmentType.FROZEN_LAKE):
            continue
        if key == "map_seed" and kind is EnvironmentType.FROZEN_LAKE:
            source.drop(at, "ROLL makes another map for each seed all the same")
        elif key == "render_mode" and kind is not None:
            if source.peek(*at) == "text":
                source.take(*at)
            else:
                source.differs(at, "the policy reads text: RLJob's environments show no images")
        elif known is None or key in known:
            value = source.copy(at)
            if value is not None:
                result[key] = value
    if len(result) > 64:
        source.drop(where, "has more than 64 keys", "put them into a file of the environment")
        result = {}
    return result


def _prompt(source: Source, where: paths.Parts) -> Section:
    manager = str(source.text(*where, "env_manager_cls", limit=512) or source.peek("env_manager_cls") or _TRAJECTORY_MANAGERS[0])
    manager = manager.rsplit(".", 1)[-1]
    by_turn = manager in _STEP_MANAGERS
    if not by_turn and manager not in _TRAJECTORY_MANAGERS:
        why = f"RLJob appends each turn to what was there, as ROLL's TrajEnvManager does; {manager} may do otherwise"
        source.differs((*where, "env_manager_cls"), why, "check environments[].prompt")
    fields: Section = {"system": _text(source, (*where, "agent_system_template")), "turn": _turn(source, where, by_turn=by_turn)}
    if by_turn:
        length = source.integer(*where, "history_length", high=10_000) or 0
        shows = any(f"{{{name}}}" in (fields["turn"] or "") for name in ("history", "history_length"))
        turns = max(0, length - 1) if shows else 0
        fields |= {"history": "Turn", "memoryTurns": turns or None, "memory": _STEP_MANAGERS[manager] if turns else None}
        if manager == "StepConcatEnvManager" and fields["turn"]:  # which writes the suffix behind the observation
            fields["turn"] = fields["turn"].replace("{current_observation}", "{current_observation}\n{suffix}")
    elif source.has(*where, "history_length"):
        source.drop((*where, "history_length"), f"{manager} keeps all turns")
    return compact(fields)


def _text(source: Source, where: paths.Parts) -> str | None:
    """A template; an empty one is none."""
    if source.peek(*where) == "":
        source.take(*where)
        return None
    return source.text(*where, limit=_MAX_TEXT)


def _turn(source: Source, where: paths.Parts, *, by_turn: bool) -> str | None:
    """The message of a turn, where RLJob can fill it in."""
    template = _text(source, (*where, "agent_template"))
    before, after = (_text(source, (*where, f"{place}_step_template")) for place in ("pre", "next"))
    at = (*where, "agent_template" if template is not None else "pre_step_template")
    if template is None and (before is not None or after is not None):
        template = f"{before or ''}{{observation}}{after or ''}"
        source.differs(at, "becomes the text before the observation, which was an image")
    if template is None:
        return None
    known = OF_ONE_TURN if by_turn else KEPT
    try:
        found = placeholders(template)
    except ValueError:
        found = ["?"]
    if not all(name in known for name in found) or not any(name in OBSERVATIONS for name in found):
        source.differs(at, f"is left out: filled in are {', '.join(known)}, and the observation must be there", "set environments[].prompt")
        return None
    return template


def validation(source: Source, steps: int) -> Section | None:
    """Validation of an agentic job: ROLL samples as in training, whatever the comments of its files say."""
    manager, infer = (VALIDATION,), ("actor_infer", "generating_args")
    if not steps:
        if source.has("eval_steps") and not source.has(VALIDATION):
            source.drop(("eval_steps",), "the file has no val_env_manager", "give environments a validationShare")
        elif source.has("eval_steps"):
            source.integer("eval_steps", low=-1)
        return None
    samples = source.integer(*manager, "group_size", low=1, high=4096) or 1
    size = source.integer("val_batch_size", low=1) if source.peek("val_batch_size") != -1 else None
    groups = source.integer(*manager, "num_env_groups", low=1)
    if size is None:
        size = (groups or 128) * samples
        source.assume(("val_batch_size",), size, "as many episodes as the environments play at one time")
    elif groups is not None and groups != max(1, size // samples):
        source.differs((*manager, "num_env_groups"), "RLJob plays as many episodes at one time as engines have room")
    temperature, top_p = source.number(*infer, "temperature", high=2.0), source.number(*infer, "top_p", above=0.0, high=1.0)
    top_k = source.integer(*infer, "top_k", low=-1)
    temperature = 0.95 if temperature is None else temperature
    section = {
        "everySteps": steps,
        "maxPrompts": max(1, size // samples),
        "samplesPerPrompt": samples if samples > 1 and temperature else None,
        "temperature": temperature or None,
        "topP": (0.7 if top_p is None else top_p) if temperature else None,
        "topK": max(0, 50 if top_k is None else top_k) or None if temperature else None,
    }
    source.assume(
        ("validation",), f"temperature {temperature:g}", "ROLL validates with actor_infer's settings", "write 0 for greedy answers"
    )
    return compact(section)


def every_steps(source: Source) -> int:
    """Steps between validations; 0 without."""
    if not source.length(VALIDATION, "tags"):
        return 0
    if source.peek("eval_steps") in (0, -1):
        return 0
    steps = source.integer("eval_steps")
    return source.assume(("eval_steps",), 10, "ROLL's default") if steps is None else steps
