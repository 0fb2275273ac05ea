"""The RLJob API: types, planner, validation, conditions, naming and schema. Depends on pydantic and YAML only.

Flow of a manifest through this package::

    YAML text -> manifest.load_manifests (syntax, traps) -> v1alpha1.RLJob (types, all problems at once)
              -> validation.validate (cross-field rules, fields without effect) -> planner.plan -> Plan

Operator, CLI, local run and the driver inside the pods all call :func:`rljob_api.planner.plan` on the same spec.
"""
