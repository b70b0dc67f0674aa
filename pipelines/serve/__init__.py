"""hvd serve: one vLLM server with hybrid decoding."""
