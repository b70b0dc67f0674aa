"""Every Kafka client is opened here, for workers, learner and commands, and nowhere else.

What is said to a broker (topics, records) is in ``decoder.contracts``; here is how it is reached.
"""
