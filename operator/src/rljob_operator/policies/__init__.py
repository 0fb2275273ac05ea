"""One policy per module, each a pure function of a :class:`~rljob_operator.policies.situation.Situation`; ``decide`` orders them."""
