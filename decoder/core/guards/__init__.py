"""What may overrule a policy, each by a function of what it wanted, one after another."""
