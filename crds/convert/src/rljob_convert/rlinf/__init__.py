"""RLinf's configuration files to manifests; :mod:`~rljob_convert.rlinf.manifest` is the start."""
