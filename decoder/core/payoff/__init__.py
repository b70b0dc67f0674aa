"""Payoff statistics and token classes: policy inputs beyond the look-up itself."""
