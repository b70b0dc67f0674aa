"""What a person does with the topics: ``hvd telemetry``.

Schemas are made of the records' own code; rows are followed, described and exported; an export is
asked with DuckDB. Every command looks on: none joins a group or takes a record from anyone.
"""
