"""Live comparison: variants of the decision are interleaved on a worker's traffic."""
