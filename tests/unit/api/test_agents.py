"""Agentic jobs: what validation admits of them is what the runtime carries out."""

from pathlib import Path

import pytest

from rljob_api.rules.environments import KEPT, OF_ONE_TURN
from rljob_api.v1alpha1.environments import PARAMETERS
from rljob_api.validation import check
from rljob_api.vocabulary import EnvironmentType
from rljob_runtime.environments import codec, turn_prompts
from rljob_runtime.environments.builtin import CONVERSATIONS
from rljob_runtime.environments.frozen_lake import FrozenLakeSettings
from rljob_runtime.environments.reasoning_gym_task import ReasoningGymSettings
from rljob_runtime.environments.sokoban import SokobanSettings

JOBS = sorted((Path(__file__).parents[2] / "data" / "agents").glob("*.yaml"))
SETTINGS = {
    EnvironmentType.FROZEN_LAKE: FrozenLakeSettings,
    EnvironmentType.SOKOBAN: SokobanSettings,
    EnvironmentType.REASONING_GYM: ReasoningGymSettings,
}


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_agentic_jobs_are_valid(path: Path) -> None:
    assert check(path.read_text()).plan.component("actor_infer").devices == (1,)


def test_every_built_in_type_is_one_of_the_runtime() -> None:
    """Conversations read the spec's own models, programs of a Harness have no parameters."""
    assert set(PARAMETERS) == {*SETTINGS, *CONVERSATIONS}
    assert set(EnvironmentType) - {EnvironmentType.HARNESS} == set(PARAMETERS)


@pytest.mark.parametrize("kind", SETTINGS)
def test_parameters_are_those_of_the_runtime_with_its_defaults(kind: EnvironmentType) -> None:
    """A penalty is for all environments alike and stands in ``rewards``; images are not shown."""
    ours, theirs = PARAMETERS[kind].model_fields, SETTINGS[kind].model_fields
    assert set(theirs) - set(ours) == {"format_penalty", "render_mode"} & set(theirs)
    assert set(ours) <= set(theirs)
    given = {name: field.default for name, field in ours.items() if field.default is not None and not field.is_required()}
    assert given == {name: theirs[name].default for name in given}


def test_messages_have_the_placeholders_of_the_codec() -> None:
    assert set(KEPT) == set(codec.TURN_FIELDS)
    assert set(OF_ONE_TURN) == {*codec.TURN_FIELDS, *turn_prompts.FIELDS}
