"""The learner's registry: real MLflow on SQLite."""

from tests.learner.conftest import empty_store, registry

__all__ = ["empty_store", "registry"]
