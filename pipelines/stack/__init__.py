"""``hvd up``: broker, registry, worker and learner as processes of one machine."""
