"""Where drafts come from: the suffix cache and the EAGLE3 head. Knows nothing of choosing."""
