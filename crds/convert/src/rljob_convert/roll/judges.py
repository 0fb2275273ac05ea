"""ROLL configurations: rewards that a language model gives (LLMJudgeRewardWorker).

What the worker does: ``roll/pipeline/rlvr/rewards/llm_judge_reward_worker.py`` of ROLL (https://github.com/alibaba/ROLL, commit 8eb27cc2):
``api`` asks an endpoint, ``inference`` a model on devices of its own, ``cluster`` the model of the section ``reward_model``. A response
scores 1 where "yes" is anywhere in the judge's words, else 0.
"""

from __future__ import annotations

from rljob_api import paths
from rljob_convert.common import SECRET_NAME, Section, compact
from rljob_convert.roll.judge_places import SERVED
from rljob_convert.source import Source

WORKER, DOMAIN = "LLMJudgeRewardWorker", "llm_judge"
MODEL_WORKER = "RewardWorker"
KEY_VARIABLE = "JUDGE_API_KEY"
SERVED_URL = "http://judge:8000/v1"
IN_FLIGHT = 64
"""Default of judge.limits.inFlight, of which each process needs a share."""
_API = "api"
_TYPES = {_API: _API, "inference": "inference", "cluster": "cluster"}
_PROMPT = "Qwen2.5-7B-Instruct-RLVR-prompt"
"""The only one that ROLL has by name."""
_SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50}
"""Defaults of ROLL's GeneratingArguments."""
_TEMPLATE = """Compare the final answer of a solution with the reference answer.
Say YES if they agree in every part, whatever language or notation they are written in.
Say NO if they differ, or if the solution is incomplete or unclear. Say nothing else.

Question:
{question}

Solution:
{response}

Reference answer:
{answer}
"""


def is_judge(worker: str, domain: str) -> bool:
    """Whether a reward is given by a language model."""
    return worker == WORKER or (not worker and domain == DOMAIN)


def judge_reward(source: Source, where: paths.Parts, num_workers: int, component: str | None) -> Section:
    """Type and judge of a reward that ``num_workers`` processes compute, each of which may ask at any time.

    ``component`` serves its model; None: it is served elsewhere.
    """
    kind = source.choice(_TYPES, *where, "judge_model_type") or _API
    _note_prompt(source, where)
    asked = _asked(source, where, kind, component)
    parser = {"pattern": "(?i)yes", "values": {"yes": 1.0}, "otherwise": 0.0}
    sampling = _sampling(source, where, kind)
    judge = {**asked, "template": _TEMPLATE, "sampling": sampling, "parser": parser}
    if num_workers > IN_FLIGHT:
        judge["limits"] = {"inFlight": num_workers}
    return {"type": "LLMJudge", "judge": judge}


def is_reward_model(worker: str) -> bool:
    """Whether a reward is given by a classification model (RewardWorker of ``roll/pipeline/base_worker.py``)."""
    return worker == MODEL_WORKER


def judging_section(source: Source, where: tuple[str, ...], domain: str) -> tuple[str, ...] | None:
    """The section of the model on devices that a reward asks; None: it asks none of the file's."""
    worker = str(source.peek(*where, "worker_cls") or "").rsplit(".", 1)[-1]
    kind = source.peek(*where, "judge_model_type")
    if is_reward_model(worker) or (is_judge(worker, domain) and kind == "inference"):
        return where
    return SERVED if is_judge(worker, domain) and kind == "cluster" else None


def model_reward(source: Source, where: paths.Parts, num_workers: int, component: str | None) -> Section:
    """Type and model of such a reward: it reads prompt and response as the policy does; arguments as of :func:`judge_reward`."""
    at = (*where, "worker_cls")
    why = "becomes a RewardModel, whose server gets the text of prompt and response where ROLL passes the policy's token ids"
    source.differs(at, why, "check that the model has the policy's tokenizer, or write rewardModel.template")
    section: Section = {**_asked(source, where, "inference", component), "template": "{prompt}{response}"}
    if num_workers > IN_FLIGHT:
        section["limits"] = {"inFlight": num_workers}
    return {"type": "RewardModel", "rewardModel": section}


def key_variables(source: Source, where: paths.Parts) -> list[Section]:
    """The environment variable of the judge's API key, where the file has one; its value is never read."""
    if not source.has(*where, "judge_api_key"):
        return []
    at = (*where, "judge_api_key")
    why = f"becomes {KEY_VARIABLE} from the Secret {SECRET_NAME}: a manifest is readable for many"
    source.differs(at, why, f"create that Secret with the key {KEY_VARIABLE}")
    return [{"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": {"name": SECRET_NAME, "key": KEY_VARIABLE}}}]


def _asked(source: Source, where: paths.Parts, kind: str, component: str | None) -> Section:
    if component is None:
        return {"endpoint": _endpoint(source, where, kind)}
    own = (*where, "model_args", "model_name_or_path")
    if source.has(*own) and source.peek(*own) == source.peek(*SERVED, *own[-2:]):
        source.take(*own)
    return {"component": component}


def _endpoint(source: Source, where: paths.Parts, kind: str) -> Section:
    if kind == _API:
        url_at, model_at = (*where, "judge_api_url"), (*where, "judge_model_name")
        url = source.text(*url_at) or source.assume(url_at, SERVED_URL, "the file names no endpoint", "set judge.endpoint.url")
        model = source.text(*model_at, limit=256) or source.assume(model_at, "judge", "the file names no model", "set judge.endpoint.model")
        key = KEY_VARIABLE if source.has(*where, "judge_api_key") else None
        return compact({"url": url, "model": model, "apiKeyEnv": key})
    model_at = (*where, "model_args", "model_name_or_path")
    model = source.text(*model_at, limit=256) or source.assume(model_at, "judge", "the file names no model", "set judge.endpoint.model")
    why = "the judge's model has to be served beside the job: the file does not say on which devices"
    remedy = f"run `vllm serve {model}` and set judge.endpoint.url, or add a component with role Judge"
    source.assume((*where, "judge_model_type"), SERVED_URL, why, remedy)
    return {"url": SERVED_URL, "model": model}


def _sampling(source: Source, where: paths.Parts, kind: str) -> Section:
    """By the names of the endpoint; ROLL asks an endpoint with its own defaults."""
    if kind == _API:
        return {}
    args = (*where, "generating_args")
    sampling: Section = {
        "temperature": source.number(*args, "temperature", high=100.0),
        "top_p": source.number(*args, "top_p", high=1.0, above=0.0),
        "top_k": source.integer(*args, "top_k"),
        "max_tokens": source.integer(*args, "max_new_tokens", low=1),
    }
    for key, default in _SAMPLING.items() if source.keys(*args) else ():
        if sampling[key] is None:
            sampling[key] = source.assume((*args, key), default, "ROLL's default")
    return compact(sampling)


def _note_prompt(source: Source, where: paths.Parts) -> None:
    at = (*where, "judge_prompt")
    name = source.text(*at, limit=256)
    if name == _PROMPT:
        source.differs(at, "the template asks the same in other words: does the final answer agree with the reference, YES or NO")
    elif name is None:
        why = "ROLL asks for a score from 0 to 10 and then looks for yes or no; the template asks for YES or NO"
        source.assume(at, "YES or NO", why, "set judge.template and judge.parser")
    else:
        source.differs(at, f"ROLL has no prompt {name}; the template asks for YES or NO", "set judge.template and judge.parser")
