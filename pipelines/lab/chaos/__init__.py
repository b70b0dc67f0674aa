"""``hvd chaos``: fault injection into a stack under load."""
