"""Telemetry: a bounded ring of events on the decode path, exported to Kafka by another process."""
