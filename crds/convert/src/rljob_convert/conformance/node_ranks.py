"""Which machine has which node rank. RLinf takes ``RLINF_NODE_RANK`` of every machine; without it, its order depends on IP texts.

Here ranks are the given ones, else the order in which the machines are described (for a job: node group, then pod ordinal).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.errors import PlacementError, show

_RANK = re.compile(r"-?[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine before it has a rank."""

    num_accelerators: int = 0
    accelerator_type: str = "NV_GPU"
    """Type of its accelerators, whether it has any or not."""
    accelerator_model: str = "H100"
    ip: str = ""
    given_rank: object = None
    """Its ``RLINF_NODE_RANK``; None when not set."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Other variables of the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedMachines:
    """The machines a job uses, by node rank."""

    machines: tuple[Machine, ...]
    differs_from_rlinf: bool
    """Whether RLinf would number them in another order (D13)."""


def rank_machines(machines: Sequence[Machine], num_nodes: int, *, driver: int = 0, has_groups: bool = False) -> RankedMachines:
    """Put machines in the order of their node ranks and keep the first ``num_nodes``.

    Args:
        machines: all that joined.
        num_nodes: how many the job asks for.
        driver: index of the machine that the driver runs on.
        has_groups: whether node groups are configured, which RLinf allows only with given ranks.

    Raises:
        PlacementError: too few machines (N8), a rank that is not a number (N1), ranks on some machines only (N2), out of range (N3) or not
            unique (N4), node groups without ranks (N5), the driver on a machine that is not used (N6).
    """
    if len(machines) < num_nodes:
        raise PlacementError("N8", f"the job asks for {num_nodes} nodes, {len(machines)} are there", "add nodes or lower num_nodes")
    ranks = _given_ranks(machines, has_groups)
    if all(rank is None for rank in ranks):
        return RankedMachines(machines=tuple(machines[:num_nodes]), differs_from_rlinf=_is_sorted_otherwise(machines, driver, num_nodes))
    given = [rank for rank in ranks if rank is not None]
    if len(given) < len(machines):
        raise PlacementError("N2", f"{len(given)} of {len(machines)} machines have RLINF_NODE_RANK", "set it on all of them or on none")
    wrong = next((rank for rank in given if not 0 <= rank < len(machines)), None)
    if wrong is not None:
        raise PlacementError("N3", f"RLINF_NODE_RANK {wrong} is not within 0-{len(machines) - 1}", "count the machines from 0")
    if len(machines) > num_nodes and given[driver] >= num_nodes:
        raise PlacementError(
            "N6",
            f"the driver runs on node {given[driver]}, but only the first {num_nodes} nodes are used",
            "start it on a node that is used",
        )
    order = sorted(range(len(machines)), key=lambda index: given[index])[:num_nodes]
    if [given[index] for index in order] != list(range(num_nodes)):
        raise PlacementError("N4", "RLINF_NODE_RANK is not unique, or leaves a gap", f"give the machines 0 to {num_nodes - 1}, each once")
    return RankedMachines(machines=tuple(machines[index] for index in order), differs_from_rlinf=False)


def _given_ranks(machines: Sequence[Machine], has_groups: bool) -> list[int | None]:
    """The given rank of every machine, None where there is none."""
    ranks: list[int | None] = []
    for machine in machines:
        value = machine.given_rank
        text = "-1" if value is None else str(value).strip()
        if not _RANK.fullmatch(text):
            raise PlacementError("N1", f"RLINF_NODE_RANK is {show(value)}, not a whole number", "write for example 0")
        rank = 0 if len(machines) == 1 else int(text)
        if rank == -1 and has_groups:
            raise PlacementError("N5", "a machine has no RLINF_NODE_RANK, but node groups name nodes by rank", "set it on every machine")
        ranks.append(None if rank == -1 else rank)
    return ranks


def _is_sorted_otherwise(machines: Sequence[Machine], driver: int, num_nodes: int) -> bool:
    """Whether RLinf's order (by accelerator type as first met, then by IP as text, the driver's machine first) is another one."""
    kinds = [machine.accelerator_type if machine.num_accelerators else "" for machine in machines]
    first_met = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    order = sorted(range(len(machines)), key=lambda index: (index != driver, first_met[kinds[index]], machines[index].ip))
    return order[:num_nodes] != list(range(num_nodes))
