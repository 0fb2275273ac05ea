"""RLJob against TRL's GRPOTrainer on the CPU of one machine: the same model, prompts, rewards, batch and updates."""
