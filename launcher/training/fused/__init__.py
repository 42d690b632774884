"""Decoder layers of Qwen models as two hand-written autograd functions around their attention."""
