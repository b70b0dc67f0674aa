"""Whether a candidate is better than the champion: costs, values, clusters, tests, drift."""
