"""The RLJob API: types, checks, planner, conditions, names and schema. Depends on pydantic and YAML only.

Flow of a manifest through this package, all of it behind :func:`rljob_api.validation.check`::

    YAML text -> reading (syntax, traps, which document, types, unknown keys) -> v1alpha1.RLJob
              -> rules (between fields, fields without effect yet) + planner.plan + memory (what fits)
              -> CheckedJob(job, plan)

    v1alpha1    the types of spec and status          planning    Plan of a spec with explicit placements, what follows from it
    roles       what each role means to the rest      auto        placement.mode Auto: candidates, their cost, the choice
    crd         schema, reference pages, policy       memory      what every device and node needs, in every phase
    placement   node groups, both rank grammars       rules       rules between fields, by subject

Every problem is a :class:`rljob_api.errors.FieldError`; they travel together in one
:class:`~rljob_api.errors.SpecInvalidError`. Operator, CLI, local run and the driver inside the pods all call
:func:`rljob_api.planner.plan` on the same spec.

``python -m rljob_api generate`` writes the CRD and ``docs/reference`` from the models (:mod:`rljob_api.crd`).
"""
