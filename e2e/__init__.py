"""End-to-end tests and the cluster they run on."""
