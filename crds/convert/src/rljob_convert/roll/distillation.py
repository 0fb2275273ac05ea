"""ROLL configurations: on-policy distillation (OPD), where teachers score the tokens that the student samples.

What ROLL does: ``_handle_opd_mapping`` of its ``roll/configs/base_config.py`` and ``compute_advantage`` of ``roll/utils/functionals.py``
(https://github.com/alibaba/ROLL, commit 8eb27cc2).
A file with ``student_train`` is started for distillation alone: advantages are minus the
log-ratio, rewards are computed and count for nothing. ``use_opd`` takes the log-ratio from the advantages of rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_convert.common import Section
from rljob_convert.roll.teachers import TEACHER, Teacher, teachers
from rljob_convert.source import Source

_STUDENTS = {"student_train": "actor_train", "student_infer": "actor_infer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """Whom the policy follows."""

    teachers: tuple[Teacher, ...]
    is_pure: bool
    """Whether rewards count for nothing."""
    section: Section
    """``algorithm.distillation``."""

    @property
    def chooses_by_tag(self) -> bool:
        """Whether the tag of a prompt chooses its teacher."""
        return any("sources" in teacher.teaches for teacher in self.teachers)


def distilled(source: Source, domains: Sequence[Sequence[str]], environments: Mapping[str, str], *, is_agentic: bool) -> Distilled | None:
    """The teachers of a file that asks for some; reads the students' sections as those of actors.

    ``domains`` are the tags of each reward; ``environments`` what RLJob calls those of an agentic job, by tag.
    """
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
    coefficient, found = teachers(source, domains, environments)
    _estimator(source)
    section: Section = {"coefficient": coefficient, "placement": "Reward"}
    return Distilled(teachers=found, is_pure=is_pure and not is_agentic, section=section)


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


def _estimator(source: Source) -> None:
    kind = source.peek("kl_penalty")
    if kind == "kl":
        source.take("kl_penalty")
    elif kind is not None:
        source.drop(("kl_penalty",), "the distance to a Teacher is the log-ratio, ROLL's kl")
