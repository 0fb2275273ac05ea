"""A job that has started keeps a spec that a later version refuses: there must be objects for it."""

from rljob_api.errors import SpecInvalidError
from rljob_api.validation import check
from rljob_operator.desired import attempt_objects
from tests.support import invalid_manifests
from tests.unit.operator.desired.builders import SETTINGS, view


def test_what_is_tolerated_can_be_rendered() -> None:
    num_rendered = 0
    for table in invalid_manifests.tables():
        for case in invalid_manifests.read(table):
            try:
                checked = check(case.manifest(), started=True)
            except SpecInvalidError:
                continue  # cannot be read or placed, or an edit solves it
            assert checked.tolerated, case.name
            objects = attempt_objects(view(checked), checked, 2, SETTINGS)
            assert objects[-1]["kind"] == "RayJob", case.name
            num_rendered += 1
    assert num_rendered > 100
