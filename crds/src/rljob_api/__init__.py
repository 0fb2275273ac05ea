"""The RLJob API: types, checks, planner, conditions, names and schema. Depends on pydantic and YAML only.

Flow of a manifest through this package, all of it behind :func:`rljob_api.validation.check`::

    YAML text -> yamltext.load (syntax, traps) -> manifest.read (which document) -> manifest.to_job (types, unknown keys)
              -> validation (rules between fields) + supported (fields without effect yet) + planner.plan + memory (what fits)
              -> CheckedJob(job, plan)

Every problem is a :class:`rljob_api.errors.FieldError`; they travel together in one
:class:`~rljob_api.errors.SpecInvalidError`. Operator, CLI, local run and the driver inside the pods all call
:func:`rljob_api.planner.plan` on the same spec.

``python -m rljob_api generate`` writes the CRD and ``docs/reference`` from the models (:mod:`rljob_api.schema`,
:mod:`rljob_api.reference`).
"""
