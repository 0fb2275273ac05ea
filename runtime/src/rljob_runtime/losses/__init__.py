"""Losses and advantages as pure functions, one file per concern, each formula with its source.

``config`` (settings, no torch) · ``advantage`` (numpy) · ``policy``, ``variants`` and ``kl`` (per-token terms, torch) ·
``correction`` (factors on them) over ``spans`` of tokens · ``aggregate`` (per-token weights that turn terms into one scalar) ·
``objective`` (the scalar). Nothing is imported here: settings and advantages must load without torch.

Shape legend: ``T`` tokens of all sequences one after another, ``S`` sequences, ``N`` trained tokens of one micro-batch.
"""
