"""Benchmarks: decoding methods against each other, in the reference engine and in a server."""
