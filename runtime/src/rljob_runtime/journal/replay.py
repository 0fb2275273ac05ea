"""What a restarted driver goes on with: batches to be trained again, groups to be trained, prompts that are done. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rljob_runtime.journal.codec import decode_group
from rljob_runtime.journal.reading import Adopted, History
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.group_log import Ending, Recovered


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Where the driver starts, as its checkpoint has it; step 0 without one."""

    version: int
    first_prompt: int
    """Index of the first prompt that the source gives."""
    done: Collection[int] = ()
    """Prompts from that one on that were trained or released already."""

    def open(self, prompt: int) -> bool:
        """Whether a prompt was not done yet."""
        return prompt >= self.first_prompt and prompt not in self.done


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a batch may be."""

    groups_per_step: int
    total_steps: int
    max_staleness: int


def recover(history: History, start: StartingPoint, bounds: Bounds) -> Recovered:
    """What of a history, read with ``start.open``, goes on from there.

    Batches are trained again as long as there is none missing, each is whole and none of its groups is too old under the present bound.
    Other groups wait, except those sampled by weights newer than the last of these batches. What is left out is asked again.

    Raises:
        DamagedError: a group's record contradicts itself.
    """
    groups = {i: decode_group(frame) for i, frame in history.groups.items()}
    batches: dict[int, tuple[Group, ...]] = {}
    version = start.version
    while version < bounds.total_steps and (batch := _batch(history.steps.get(version, ()), groups, version, bounds)):
        batches[version] = batch
        for group in batch:
            del groups[group.group_id]
        version += 1
    waiting = [group for i, group in sorted(groups.items()) if i not in history.released and group.newest_version <= version]
    released = {i: Ending(release.ending) if release.row >= start.version else None for i, release in history.released.items()}
    return Recovered(batches=batches, waiting=tuple(waiting), released=released)


def adopted(recovered: Recovered, start: StartingPoint) -> Adopted:
    """What the journal's next file says of those before it."""
    return Adopted(
        first_version=start.version,
        next_version=start.version + len(recovered.batches),
        groups=frozenset(group.group_id for group in recovered.groups),
        released=frozenset(recovered.released),
    )


def _batch(ids: Sequence[int], groups: dict[int, Group], version: int, bounds: Bounds) -> tuple[Group, ...]:
    """The groups of a batch, empty where it cannot be trained again."""
    if len(ids) != bounds.groups_per_step or len(set(ids)) != len(ids) or not all(i in groups for i in ids):
        return ()
    batch = tuple(groups[i] for i in ids)
    usable = all(version - bounds.max_staleness <= g.oldest_version and g.newest_version <= version for g in batch)
    return batch if usable else ()
