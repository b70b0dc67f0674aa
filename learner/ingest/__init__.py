"""Reads draft events from Kafka, each once, as training rows; sets aside what it refuses."""
