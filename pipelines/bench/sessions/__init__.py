"""hvd bench sessions: servers under what agents send, turn after turn over files and results."""
