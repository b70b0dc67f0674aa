"""Multi-tenancy: whose a request is, and how tenants share memory.

``middleware`` runs in vLLM's API process and identifies the tenant of a request. ``identities``
seals that identity into the request and verifies it in the engine. ``key`` loads the operator's
key, under which names are hashed. ``shares`` divides a bounded memory among tenants.
"""
