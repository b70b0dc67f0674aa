"""Guards that may override a policy's choice, applied one after another."""
