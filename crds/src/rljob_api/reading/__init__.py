"""From text to a typed job: YAML without its traps, documents, types, unknown keys.

::

    text -> yaml_text.load -> manifest.read (picks the RLJob) -> manifest.to_job -> RLJob
              yaml_words: mistakes in YAML      meant: values with units, names of papers, lists instead of text
"""
