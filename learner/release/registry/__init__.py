"""Policies in MLflow: versions and their aliases, what they were learned from, and who moved what.

The only room that imports mlflow, and it does so when a :class:`Registry` is first used: the import
takes two seconds.

============  ======================================================================
versions      a policy becomes a version of its scope's model, an alias moves, old ones are retired
standing      what the registry says of a scope and of a version
runs          a candidate's run: figures, parameters, and the model that it becomes
as_logged     the code that is logged with it, numpy alone
moves         who moved which alias, when, and why; a learner's takes nothing of a person's back
connection    the client, and one kind of error
============  ======================================================================
"""

from learner.release.registry.standing import Standing, Version, digest_of
from learner.release.registry.versions import ARTIFACT, Registry

__all__ = ["ARTIFACT", "Registry", "Standing", "Version", "digest_of"]
