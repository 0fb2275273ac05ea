"""The cache: newer wins, deletions stay deletions, everything is found by job, and the lag of watches is known."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.naming import ATTEMPT_LABEL, JOB_LABEL
from rljob_operator.cache import Cache, Source
from rljob_operator.model import Key, Manifest
from rljob_operator.protocol import WATCHED, Kind

KEY = Key(namespace="team", name="math")


def _rljob(version: int, name: str = "math", reason: str | None = None) -> Manifest:
    metadata = {"name": name, "namespace": "team", "uid": "u1", "generation": 1, "resourceVersion": str(version), "managedFields": [1]}
    status = {"conditions": [{"type": "Succeeded", "status": "Unknown", "reason": reason}]} if reason else {}
    return {"metadata": metadata, "spec": {"seed": version}, "status": status}


def _child(version: int, job: str | None = "math", name: str = "math-a1", uid: str = "c1", **status: str) -> Manifest:
    labels = {} if job is None else {JOB_LABEL: job, ATTEMPT_LABEL: "1"}
    metadata = {"name": name, "namespace": "team", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, "spec": {}, "status": status}


def _seed(cache: Cache) -> int | None:
    job = cache.job(KEY)
    return None if job is None else job.spec["seed"]


def test_what_was_put_in_is_found_by_job():
    cache = Cache()
    assert cache.put(Kind.RLJOB, _rljob(5), Source.WATCH) == KEY
    assert cache.put(Kind.RAYJOB, _child(6), Source.WATCH) == KEY
    assert cache.put(Kind.POD, _child(7, name="math-a1-head"), Source.WATCH) == KEY
    assert cache.put(Kind.RAYCLUSTER, _child(8, name="math-a1-c"), Source.WATCH) == KEY
    assert cache.put(Kind.RAYJOB, _child(9, job="other", name="other-a1"), Source.WATCH) == Key(namespace="team", name="other")
    assert [child.name for child in cache.children(KEY)] == ["math-a1"]
    assert [pod.name for pod in cache.pods(KEY)] == ["math-a1-head"]
    assert [cluster.name for cluster in cache.clusters(KEY)] == ["math-a1-c"]
    assert cache.uid(Kind.RAYJOB, KEY, "math-a1") == "c1"
    assert cache.keys() == [KEY]


def test_an_older_event_does_not_undo_the_answer_to_an_own_write():
    cache = Cache()
    cache.put(Kind.RLJOB, _rljob(5), Source.WATCH)
    cache.put(Kind.RLJOB, _rljob(9), Source.OTHER)
    assert cache.put(Kind.RLJOB, _rljob(7), Source.WATCH) is None
    assert _seed(cache) == 9


def test_the_echo_of_an_own_write_triggers_no_reconcile():
    cache = Cache()
    cache.put(Kind.RLJOB, _rljob(9), Source.OTHER)
    assert cache.put(Kind.RLJOB, _rljob(9), Source.WATCH) is None


def test_a_change_that_no_decision_needs_triggers_no_reconcile():
    cache = Cache()
    cache.put(Kind.RAYJOB, _child(5, jobStatus="RUNNING"), Source.WATCH)
    assert cache.put(Kind.RAYJOB, _child(6, jobStatus="RUNNING", dashboardURL="http://x"), Source.WATCH) is None
    assert cache.put(Kind.RAYJOB, _child(7, jobStatus="FAILED"), Source.WATCH) == KEY


def test_a_late_answer_to_a_write_does_not_resurrect_a_deleted_object():
    cache = Cache()
    cache.put(Kind.RLJOB, _rljob(5), Source.WATCH)
    assert cache.remove(Kind.RLJOB, _rljob(8)) == KEY
    assert cache.put(Kind.RLJOB, _rljob(7), Source.OTHER) is None
    assert cache.job(KEY) is None
    assert cache.put(Kind.RLJOB, _rljob(9), Source.WATCH) == KEY, "one that was created again counts"


def test_a_late_deletion_does_not_remove_the_successor():
    cache = Cache()
    cache.put(Kind.RAYJOB, _child(5), Source.WATCH)
    cache.put(Kind.RAYJOB, _child(9, uid="c2"), Source.OTHER)
    assert cache.remove(Kind.RAYJOB, _child(7)) is None
    assert cache.uid(Kind.RAYJOB, KEY, "math-a1") == "c2"


def test_removing_the_label_is_a_deletion():
    cache = Cache()
    cache.put(Kind.RAYJOB, _child(5), Source.WATCH)
    assert cache.put(Kind.RAYJOB, _child(6, job=None), Source.WATCH) == KEY
    assert cache.children(KEY) == ()


def test_a_sweep_drops_what_a_full_list_lacks_unless_it_is_newer():
    cache = Cache()
    cache.put(Kind.RAYJOB, _child(5, name="math-a1"), Source.WATCH)
    cache.put(Kind.RAYJOB, _child(6, name="math-a2"), Source.WATCH)
    cache.put(Kind.RAYJOB, _child(30, name="math-a3"), Source.WATCH)
    assert cache.sweep(Kind.RAYJOB, {(Kind.RAYJOB, "team", "math-a1")}, 20) == [KEY]
    assert [child.name for child in cache.children(KEY)] == ["math-a1", "math-a3"]
    assert cache.put(Kind.RAYJOB, _child(6, name="math-a2"), Source.WATCH) is None


def test_a_sweep_of_one_namespace_leaves_the_others_alone():
    cache = Cache()
    cache.put(Kind.RLJOB, _rljob(5), Source.WATCH)
    assert cache.sweep(Kind.RLJOB, set(), 20, ("elsewhere",)) == []
    assert cache.sweep(Kind.RLJOB, set(), 20, ("team",)) == [KEY]


def test_jobs_are_counted_by_the_reason_of_succeeded():
    cache = Cache()
    cache.put(Kind.RLJOB, _rljob(5), Source.WATCH)
    cache.put(Kind.RLJOB, _rljob(5, name="b", reason="Running"), Source.WATCH)
    assert cache.num_jobs_by_reason() == {"Pending": 1, "Running": 1}
    cache.put(Kind.RLJOB, _rljob(6, reason="Running"), Source.WATCH)
    cache.remove(Kind.RLJOB, _rljob(7, name="b"))
    assert cache.num_jobs_by_reason() == {"Running": 1}


def test_the_age_of_a_watch_that_does_not_deliver_a_known_change():
    now = [100.0]
    cache = Cache(lambda: now[0])
    cache.put(Kind.RLJOB, _rljob(5), Source.WATCH)
    cache.put(Kind.RLJOB, _rljob(9), Source.OTHER)
    now[0] = 130.0
    cache.put(Kind.RLJOB, _rljob(11), Source.OTHER)
    assert cache.watch_ages_s()["RLJob"] == 30.0
    cache.put(Kind.RLJOB, _rljob(9), Source.WATCH)
    assert cache.watch_ages_s()["RLJob"] == 30.0, "version 11 is not delivered yet"
    cache.put(Kind.RLJOB, _rljob(11), Source.WATCH)
    assert cache.watch_ages_s()["RLJob"] == 0.0


def test_a_change_that_the_watch_delivered_first_is_not_pending():
    now = [0.0]
    cache = Cache(lambda: now[0])
    cache.put(Kind.RLJOB, _rljob(9), Source.WATCH)
    cache.put(Kind.RLJOB, _rljob(9), Source.OTHER)
    now[0] = 60.0
    assert cache.watch_ages_s()["RLJob"] == 0.0


def test_nothing_is_kept_of_a_job_that_is_gone():
    now = [0.0]
    cache = Cache(lambda: now[0])
    cache.put(Kind.RLJOB, _rljob(5), Source.OTHER)
    cache.put(Kind.RAYJOB, _child(6), Source.OTHER)
    cache.remove(Kind.RLJOB, _rljob(7))
    cache.remove(Kind.RAYJOB, _child(8))
    now[0] = 60.0
    assert (cache.keys(), cache.children(KEY), cache.num_jobs_by_reason()) == ([], (), {})
    assert [cache.versions(kind) for kind in WATCHED] == [{}] * len(WATCHED)
    assert set(cache.watch_ages_s().values()) == {0.0}


@given(st.lists(st.tuples(st.sampled_from(["put", "remove"]), st.integers(1, 12), st.sampled_from(list(Source))), max_size=30))
def test_the_newest_version_wins_in_any_order(updates):
    """Each version is either a state or the deletion of the object, as on a server."""
    kinds = {version: what for what, version, _ in reversed(updates)}
    cache = Cache()
    for _, version, source in updates:
        if kinds[version] == "put":
            cache.put(Kind.RLJOB, _rljob(version), source)
        else:
            cache.remove(Kind.RLJOB, _rljob(version))
    newest = max(kinds, default=0)
    assert _seed(cache) == (newest if kinds.get(newest) == "put" else None)


def test_a_child_whose_label_was_removed_is_not_waited_for():
    """The watch selects by the label: it tells the removal, and nothing of what happens to the object then."""
    now_s = 0.0
    cache = Cache(lambda: now_s)
    cache.put(Kind.RAYJOB, _child(5), Source.WATCH)
    cache.remove(Kind.RAYJOB, _child(6, job=None))
    cache.put(Kind.RAYJOB, _child(7, job=None), Source.OTHER)  # read again, after a change of its status
    now_s = 300.0
    assert cache.watch_ages_s()["RayJob"] == 0.0
    assert cache.children(KEY) == ()
