"""From a candidate that won to what workers serve: MLflow, publication, rollouts."""
