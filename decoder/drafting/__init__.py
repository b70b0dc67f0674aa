"""The suffix cache and its look-ups. Independent of the policy."""
