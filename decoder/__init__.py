"""Serves tokens; owns one decoding cycle: propose, predict, decide, verify, label, report."""
