"""What is found out about a teacher before anything starts: whether it speaks of the same tokens as the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rljob_api.rules.distillation import untaught_tags
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_runtime.data.tokenizer import load_tokenizer
from rljob_runtime.errors import DataError, ModelError
from rljob_runtime.job.model_shape import config_of_folder


def check_teachers(spec: RLJobSpec, named: RLJobSpec) -> None:
    """Compare the vocabulary of every Teacher with the policy's: equal ids must be equal tokens, and sampled ids be known to it.

    Args:
        spec: with folders on this machine in place of Hub ids.
        named: as the user wrote it, for messages.

    Raises:
        ModelError: a tokenizer cannot be loaded, or they differ.
    """
    policy = spec.model.tokenizer_path or spec.model.path
    known: Mapping[str, int] | None = None
    for index, component in spec.with_role(Role.TEACHER):
        model, wrote = component.model, named.components[index].model
        if model is None or wrote is None:
            continue
        if known is None:
            known = load_tokenizer(policy, trust_remote_code=spec.model.trust_remote_code).get_vocab()
        where = f"spec.components[{index}].model.path {wrote.path!r}"
        try:
            own = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code).get_vocab()
        except ModelError as error:
            raise ModelError(f"{where}: {error}; a Teacher's folder needs its tokenizer, to be compared with the policy's") from error
        if own != known:
            raise ModelError(
                f"{where} has another vocabulary than {named.model.tokenizer_path or named.model.path}: {_difference(own, known)}; "
                "use a teacher of the policy's own family, since log-probs are compared token by token"
            )
        size, needed = _size(config_of_folder(model.path)), _size(config_of_folder(spec.model.path))
        if size is not None and needed is not None and size < needed:
            raise ModelError(
                f"{where} has vocab_size {size} in its config.json and the policy {needed}: ids of the policy that the teacher lacks "
                "could be sampled; use a teacher whose vocab_size is as large"
            )


def check_taught(spec: RLJobSpec, source: str, tags: Iterable[str]) -> None:
    """Whether prompts with these tags of a data source have a teacher, in a job that has one.

    Raises:
        DataError: some have none.
    """
    untaught = untaught_tags(spec, sorted(tags))
    if untaught:
        raise DataError(
            f"data source {source!r}: the tag {untaught[0]!r} has no teacher, nor have {len(untaught) - 1} others; add it to the "
            "teaches.sources of a Teacher, or a Teacher without teaches.sources"
        )


def _difference(own: Mapping[str, int], known: Mapping[str, int]) -> str:
    """Sizes, and the first id that the two read differently."""
    ours, theirs = ({number: token for token, number in vocabulary.items()} for vocabulary in (known, own))
    first = min(number for number in ours.keys() | theirs.keys() if ours.get(number) != theirs.get(number))
    sizes = f"{len(own)} tokens against {len(known)}"
    return f"{sizes}, and id {first} is {_shown(theirs.get(first))} there, {_shown(ours.get(first))} to the policy"


def _shown(token: str | None) -> str:
    return "nothing" if token is None else repr(token)


def _size(config: Mapping[str, Any] | None) -> int | None:
    """Rows of the embedding; None where the file does not say."""
    if config is None:
        return None
    text = config.get("text_config")
    size = (text if isinstance(text, Mapping) else config).get("vocab_size")
    return size if isinstance(size, int) else None
