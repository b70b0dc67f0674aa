"""Kafka clients: the only place that opens one, for workers, learner and commands.

Topics and records are in ``decoder.contracts``.
"""
