"""Random and mutated specs against a real API server, the planner and the operator."""
