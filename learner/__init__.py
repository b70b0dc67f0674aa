"""Learns from draft events and publishes policies: ingest, training, evaluation, release.

May import ``decoder.contracts``, ``decoder.policy`` and ``decoder.kafka``; of this project, only
``pipelines`` imports it.
"""
