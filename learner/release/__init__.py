"""Registers candidates in MLflow, publishes policies to workers, and rolls them out."""
