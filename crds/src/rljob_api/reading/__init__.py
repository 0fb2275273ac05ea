"""From text to a typed job: YAML without its traps, documents, types, unknown keys."""
