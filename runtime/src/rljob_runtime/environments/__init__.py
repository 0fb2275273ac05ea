"""Environments of agentic jobs: the protocol that users write theirs against. Nothing runs them yet: validation refuses agentic jobs."""
