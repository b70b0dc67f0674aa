"""Trials: sides that decide in turn, and what their blocks say of each other."""
