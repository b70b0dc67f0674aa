"""A folder for PYTHONPATH: a process that starts with it has a clock that can be put on."""
