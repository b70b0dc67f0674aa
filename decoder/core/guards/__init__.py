"""What may overrule a policy: each a small function of what it wanted, applied one after another."""
