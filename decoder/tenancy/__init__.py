"""Who a request belongs to, and what belongs to whom.

``middleware`` runs in vLLM's API process and tells tenants apart, by what ``callers`` lists;
``identities`` are what it writes into a request and what the engine believes of it; ``key`` is the
operator's key, under which all names are hashed; ``shares`` divides a bounded memory among tenants.
Nothing here knows an engine.
"""
