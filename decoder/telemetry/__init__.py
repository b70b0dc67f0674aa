"""Events leave the worker here: a bounded queue on the decode path, Kafka behind it in a thread."""
