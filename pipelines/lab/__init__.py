"""The laboratory: what measures, simulates and trains before anything is served."""
