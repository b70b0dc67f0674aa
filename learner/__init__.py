"""Turns draft events into a better policy bundle: consume, learn, tune, gate, register, publish.

May import ``decoder.contracts``, ``decoder.policy`` and ``decoder.kafka``; nothing of ours
imports it but ``pipelines``.
"""
