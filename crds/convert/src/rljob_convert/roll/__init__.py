"""ROLL's pipeline files to manifests; :mod:`~rljob_convert.roll.manifest` is the start."""
