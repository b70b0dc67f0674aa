"""Evaluates challengers and detects drift: costs, off-policy values, clusters, sequential tests."""
