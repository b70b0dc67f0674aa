"""What a person does with the topics: ``hvd telemetry``.

Schemas are made of the records' own code; events are exported, and an export is asked with the SQL
beside this. Every command looks on: none joins a group or takes a record from anyone.
"""
