"""Inside vLLM: the plugin, its drafter, its cost profile, and repairs of its CPU backend."""
