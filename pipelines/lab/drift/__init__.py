"""What learning is worth, and each layer beneath it, when traffic changes: ``hvd drift``.

Scenarios are files; their requests are recordings, changed where the scenario says so; each policy
decodes the same requests through the router that serves, and one of them learns meanwhile.
"""
