"""The trainer's tokens per second and core, beside TRL's and a plain loop's, and its memory beside the estimate.

``rows`` cuts the batches, ``sides`` computes gradients in three ways, ``speed`` times them in turns, ``memory`` measures peaks.
"""
