"""Bytes of a micro-batch, from what torch allocates and frees: `recorder` follows it, `network` has a whole model."""
