"""Learning curves of the quickstart, RLJob beside TRL's GRPOTrainer, over several seeds."""
