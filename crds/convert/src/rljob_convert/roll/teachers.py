"""ROLL configurations: the teachers of on-policy distillation, how much each counts, and which prompts it scores.

What ROLL does (https://github.com/alibaba/ROLL, commit 8eb27cc2): ``_handle_opd_mapping`` of ``roll/configs/base_config.py`` reads the
section, ``build_domain_to_teacher_names`` of ``roll/utils/functionals.py`` chooses. It chooses by domain and not by tag: the tags of one
reward are a domain, every other tag is one by itself, and a teacher scores all prompts of each domain of which it names a tag, or all that
there are if it names none. The log-ratios of all teachers of a prompt are added up, each times its ``opd_kl_coef``; in RLJob a prompt has
one teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api import paths
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.source import Source

TEACHER = "teacher"
_OWN_KEYS = ("model_args", "device_mapping", "strategy_args", "world_size", "opd_kl_coef", "tag_included")
"""A teacher has one of these; a section without them holds several teachers by name."""
_ONE = "ROLL adds up the log-ratios of all teachers of a prompt, in RLJob each prompt has one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """A component that the policy follows."""

    where: paths.Parts
    """Its section."""
    name: str
    model: Section
    teaches: Section
    """Empty where it scores all prompts, and counts as the coefficient says."""


def teachers(source: Source, domains: Sequence[Sequence[str]], names: Mapping[str, str]) -> tuple[float, tuple[Teacher, ...]]:
    """The coefficient of distillation, and all teachers that score something.

    Args:
        source: of a file that asks for them.
        domains: tags that ROLL holds together: those of each reward.
        names: what RLJob calls a tag where it calls it otherwise.
    """
    places = _places(source)
    tags = {where: source.texts(*where, "tag_included", most=common.MAX_TAGS) for where in places}
    taught = _taught(source, tags, domains)
    given = {where: source.number(*where, "opd_kl_coef", above=0.0) for where in taught}
    counts = {where: 1.0 if number is None else number for where, number in given.items()}
    coefficient = next(iter(counts.values())) if len(set(counts.values())) == 1 else 1.0
    found: list[Teacher] = []
    for where, own in taught.items():
        sources = list(dict.fromkeys(names.get(tag, tag) for tag in own))
        weight = None if counts[where] == coefficient else counts[where]
        name = _name(where, [teacher.name for teacher in found])
        found.append(Teacher(where=where, name=name, model=_model(source, where), teaches=compact({"sources": sources, "weight": weight})))
    return coefficient, tuple(found)


def _places(source: Source) -> list[paths.Parts]:
    names = source.keys(TEACHER)
    if not names or any(key in _OWN_KEYS for key in names):
        return [(TEACHER,)]
    return [(TEACHER, name) for name in names]


def _name(where: paths.Parts, taken: Sequence[str]) -> str:
    last = str(where[-1])
    return common.component_name(last if last.lower().startswith(TEACHER) else f"{TEACHER}_{last}", taken)


def _model(source: Source, where: paths.Parts) -> Section:
    place = (*where, "model_args", "model_name_or_path")
    path = source.text(*place)
    return {"path": path or source.assume(place, common.MODEL_PLACEHOLDER, "a Teacher needs a model", "write its folder or Hub id")}


def _taught(
    source: Source, tags: Mapping[paths.Parts, Sequence[str]], domains: Sequence[Sequence[str]]
) -> dict[paths.Parts, Sequence[str]]:
    """The tags of each teacher that is kept; none for the one of all prompts that no other teacher names."""
    of_all = [where for where, own in tags.items() if not own]
    default = of_all[0] if of_all else None
    for where in of_all[1:]:
        first = paths.join(of_all[0])
        source.drop(where, f"names no tags, as {first}: {_ONE}", f"give it tag_included, or keep {first} alone")
    known = {tag for domain in domains for tag in domain}
    alone = dict.fromkeys(tag for own in tags.values() for tag in own if tag not in known)
    taught: dict[paths.Parts, list[str]] = {}
    untaught: list[str] = []
    for domain in (*domains, *([tag] for tag in alone)):
        wanting = [where for where, own in tags.items() if set(own) & set(domain)]
        if wanting:
            taught.setdefault(wanting[0], []).extend(domain)
            _note_domain(source, tags, domain, wanting, default)
        elif default is None:
            untaught += domain
    for where in tags:
        if where not in taught and where not in of_all:
            source.drop(where, f"other teachers come first for all of its prompts: {_ONE}", "choose in teaches.sources")
    if untaught:
        why = f"no teacher names {', '.join(untaught)}: ROLL trains such prompts without one, and RLJob refuses them"
        source.differs((TEACHER,), why, "leave them out of the data, or name them in the teaches.sources of a Teacher")
    return {where: taught.get(where, ()) for where in tags if where in taught or where == default}


def _note_domain(
    source: Source,
    tags: Mapping[paths.Parts, Sequence[str]],
    domain: Sequence[str],
    wanting: Sequence[paths.Parts],
    default: paths.Parts | None,
) -> None:
    """What becomes of a domain that ``wanting`` name tags of; the first of them gets it."""
    first, *others = wanting
    added = [tag for tag in domain if tag not in tags[first]]
    if added:
        why = f"becomes teaches.sources with {', '.join(added)} as well: ROLL sends all prompts of a reward to its teachers"
        source.differs((*first, "tag_included"), why, "remove them there if another Teacher is to have them")
    for where in others:
        source.differs((*where, "tag_included"), f"{paths.join(first)} has {', '.join(domain)}: {_ONE}", "choose in teaches.sources")
    if default is not None:
        source.differs(default, f"does not score {', '.join(domain)}, which {paths.join(first)} has: {_ONE}", "choose in teaches.sources")
