"""Policies in MLflow.

Only this package imports mlflow, when a :class:`Registry` is first used: the import takes two
seconds.

============  ======================================================================
versions      policies as versions of a scope's model, aliases, and retirement
aliases       aliases and versions as the registry reports them
runs          the run of a candidate: figures, parameters, and the logged model
as_logged     prediction code that is logged with a model, numpy only
moves         history of alias moves; a learner's move never undoes a person's
connection    the MLflow client and its errors
============  ======================================================================
"""

from learner.release.registry.aliases import AliasState, Version, digest_of
from learner.release.registry.versions import ARTIFACT, Registry

__all__ = ["ARTIFACT", "AliasState", "Registry", "Version", "digest_of"]
