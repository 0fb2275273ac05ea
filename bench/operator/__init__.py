"""The operator against a real API server: how fast it reacts, what it costs, how both grow with the number of jobs."""
