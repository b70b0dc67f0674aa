"""Drafters: the suffix cache and the EAGLE3 head. Independent of the policy."""
