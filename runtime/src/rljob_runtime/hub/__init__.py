"""Models that lie on a Hugging Face Hub: found before anything starts, downloaded once per node, used as local folders from then on.

``source`` says what a model is made of, ``resolve`` finds it from the driver, ``download`` is the worker that fetches it on a node.
"""
