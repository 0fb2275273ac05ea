"""The operator as a process against a real API server, with KubeRay's part played by the test."""
