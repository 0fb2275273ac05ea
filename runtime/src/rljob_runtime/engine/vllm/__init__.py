"""Everything that knows vLLM: the engine, its loop thread, its memory, its environment, and how weights enter it."""
