"""The vLLM plugin; no other package of this project imports vLLM.

``plugin`` is the entry point, ``hooks`` lists the wrapped methods of vLLM, ``requirements`` the
clamped and refused settings. ``adapter`` connects a model runner to the router,
``request_options`` reads a request, ``ranks`` synchronises ranks, ``profile`` times steps. ``v1``
and ``v2`` hold what only one of vLLM's runners needs; ``runner_choice`` selects it.
"""
