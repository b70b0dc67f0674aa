"""hvd policy: what is served, who made it so, and the moves that a person makes."""
