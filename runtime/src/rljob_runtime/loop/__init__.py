"""The training loop: driver, batch builder, checkpoints, metrics of a step."""
