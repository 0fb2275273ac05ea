"""Losses, gradients and advantages of RLJob beside those of TRL and verl, on the same batches."""
