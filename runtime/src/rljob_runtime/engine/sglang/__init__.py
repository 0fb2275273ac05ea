"""SGLang as an engine: its own server, in an interpreter of its own, behind HTTP on the loopback interface."""
