"""One rule per file, each a pure function of a :class:`~rljob_operator.policies.situation.Situation`; ``decide`` puts them in order."""
