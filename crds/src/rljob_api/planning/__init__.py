"""From a spec with explicit placements to a :class:`~rljob_api.plan.Plan`, and what follows from one: environments, weight sync routes."""
