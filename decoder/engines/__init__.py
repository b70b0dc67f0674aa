"""Adapters to the engines that own the decoding loop. Only these know an engine's types."""
