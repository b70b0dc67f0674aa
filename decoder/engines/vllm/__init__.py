"""Inside vLLM: the plugin and what it needs there; nothing else of ours knows vLLM.

``plugin`` is the entry point, ``hooks`` says which of vLLM's methods it wraps, ``requirements``
what vLLM may be started with. ``adapter`` stands between a model runner and the router, ``asked``
reads a request, ``plan`` and ``ranks`` let several ranks do the same, ``profile`` times steps.
``v1`` and ``v2`` are what one of vLLM's runners takes besides; ``configured`` says which it is.
"""
