"""What the job tells of its environments, and where the files of conversations lie."""

from pathlib import Path

from rljob_api.validation import check
from rljob_runtime.environments.templates import TemplateClass
from rljob_runtime.environments.worker import EnvironmentDescription
from rljob_runtime.job import episodes, worker_settings

JOB = check((Path(__file__).parents[3] / "data" / "agents" / "tool-use.yaml").read_text()).job.spec


def test_files_are_found_from_where_the_job_was_started() -> None:
    math, talk = (worker_settings.environment_config(JOB, each, Path("/started")).parameters for each in JOB.environments)
    assert (math["path"], talk["path"]) == ("/started/data/math.jsonl", "/started/data/wishes.jsonl")
    assert [tool.get("corpus") for tool in math["tools"]] == [None, None, "/started/data/formulas.jsonl", None]


class Workers:
    """One that describes its environments."""

    def __init__(self, kinds) -> None:
        self.environments = [self]
        self.name, self._kinds = "environment-0", kinds

    async def call(self, method, *args, timeout_s):
        assert method == "describe"
        return [
            EnvironmentDescription(name=each.name, template_class=kind, stop_token_ids=(), sandbox="")
            for each, kind in zip(JOB.environments, self._kinds, strict=True)
        ]


class Events(list):
    def event(self, text, level=None) -> None:
        self.append((text, level))


async def test_a_template_that_rewrites_earlier_turns_is_reported_to_the_user() -> None:
    events = Events()
    await episodes.environments(JOB, Workers([TemplateClass.APPEND_ONLY, TemplateClass.REWRITES_HISTORY]), events)
    ((text, level),) = events
    assert "environment talk: the model's chat template would rewrite earlier turns" in text
    assert level == episodes.Level.WARNING
