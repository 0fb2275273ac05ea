"""ROLL configurations: on-policy distillation (OPD), where a teacher scores the tokens that the student samples.

What ROLL does: ``_handle_opd_mapping`` of its ``roll/configs/base_config.py`` and ``compute_advantage`` of ``roll/utils/functionals.py``
(https://github.com/alibaba/ROLL, commit 8eb27cc2).
A file with ``student_train`` is started for distillation alone: advantages are minus the
log-ratio, rewards are computed and count for nothing. ``use_opd`` takes the log-ratio from the advantages of rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api import paths
from rljob_convert import common
from rljob_convert.common import Section
from rljob_convert.source import Source

TEACHER = "teacher"
_STUDENTS = {"student_train": "actor_train", "student_infer": "actor_infer"}
_OWN_KEYS = ("model_args", "device_mapping", "strategy_args", "world_size", "opd_kl_coef")
"""A teacher has one of these; a section without them holds several teachers by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """A teacher that the policy follows."""

    where: paths.Parts
    """Its section."""
    is_pure: bool
    """Whether rewards count for nothing."""
    section: Section
    """``algorithm.distillation``."""
    model: Section
    """Of the Teacher component."""


def distilled(source: Source, *, is_agentic: bool) -> Distilled | None:
    """The teacher of a file that asks for one; reads the students' sections as those of actors."""
    students = [old for old in _STUDENTS if source.has(old)]
    for old in students:
        source.rename(old, _STUDENTS[old])
    is_pure, is_mixed = bool(source.flag("is_pure_opd")) or bool(students), bool(source.flag("use_opd"))
    source.text("pure_opd_pipeline_type")
    if not (is_pure or is_mixed):
        if source.has(TEACHER):
            source.drop((TEACHER,), "neither is_pure_opd nor use_opd is on, and the file names no student: ROLL starts no teacher")
        return None
    if is_pure and is_agentic:
        why = "scores of environments count beside the teacher; ROLL follows the teacher alone"
        source.differs((TEACHER,), why, "have the environments give no rewards")
    where = _place(source)
    coefficient = source.number(*where, "opd_kl_coef", above=0.0)
    _estimator(source)
    path = source.text(*where, "model_args", "model_name_or_path") or source.assume(
        (*where, "model_args", "model_name_or_path"), common.MODEL_PLACEHOLDER, "a Teacher needs a model", "write its folder or Hub id"
    )
    section: Section = {"coefficient": 1.0 if coefficient is None else coefficient, "placement": "Reward"}
    return Distilled(where=where, is_pure=is_pure and not is_agentic, section=section, model={"path": path})


def without_scores(source: Source, rule: Section) -> Section:
    """The learning rule of a job whose rewards only measure."""
    estimator = source.peek("adv_estimator")
    if estimator not in (None, "reinforce"):
        source.differs(("adv_estimator",), "is not used: without scores there is nothing to estimate; ROLL takes reinforce")
    elif estimator is not None:
        source.take("adv_estimator")
    advantage = {key: value for key, value in rule["advantage"].items() if key in ("whiten", "clip")}
    filters = {key: value for key, value in rule.get("filters", {}).items() if "GroupMean" not in key}
    weights = {key: value for key, value in rule.get("sampleWeights", {}).items() if key != "difficulty"}
    left_out = [*(["difficulty_mask"] if filters != rule.get("filters", {}) else [])]
    left_out += ["difficulty_loss_weight"] if weights != rule.get("sampleWeights", {}) else []
    for key in left_out:
        source.drop((key,), "scores count for nothing in distillation alone")
    kept = {key: value for key, value in rule.items() if key not in ("advantage", "reward", "kl", "filters", "sampleWeights", "critic")}
    return {"advantage": advantage, **kept, "filters": filters, "sampleWeights": weights}


def measuring(source: Source, rewards: list[Section]) -> list[Section]:
    """Rewards that count for nothing."""
    why = "have weight: 0: in distillation alone they only measure, as in ROLL"
    source.differs(("rewards",), why, "give them a weight to train on both")
    return [reward | {"weight": 0.0} for reward in rewards]


def _place(source: Source) -> paths.Parts:
    """The section of the teacher; of several the first one."""
    names = source.keys(TEACHER)
    if not names or any(key in _OWN_KEYS for key in names):
        return (TEACHER,)
    for name in names[1:]:
        why = f"{names[0]} is taken for all prompts; ROLL sends each domain to teachers of its own"
        source.drop((TEACHER, name), why, "add a component with role: Teacher for it, and teaches.sources to both")
    if source.has(TEACHER, names[0], "tag_included"):
        source.drop((TEACHER, names[0], "tag_included"), "the Teacher scores all prompts", "write its tags in teaches.sources")
    return (TEACHER, names[0])


def _estimator(source: Source) -> None:
    kind = source.peek("kl_penalty")
    if kind == "kl":
        source.take("kl_penalty")
    elif kind is not None:
        source.drop(("kl_penalty",), "the distance to a Teacher is the log-ratio, ROLL's kl")
