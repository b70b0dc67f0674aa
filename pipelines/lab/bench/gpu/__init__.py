"""hvd bench gpu: what a step costs on an accelerator, and decoding with those costs."""
