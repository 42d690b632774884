"""Features kept in pinned memory: copied in a stream of their own, while the GPU goes on with their memory."""

from __future__ import annotations

import pytest
import torch

from launcher.training import vision_cache
from launcher.training.pieces import MediaKey
from launcher.training.rows import Image
from launcher.training.vision_cache import FeatureCache


@pytest.mark.gpu
def test_what_is_taken_is_what_was_put_before_its_memory_was_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(vision_cache, "SLAB_BYTES", 2**24)
    cache = FeatureCache(2 * 2**24, device)
    keys: list[MediaKey] = [(Image(f"{number}.png", None), (1, 2, 2)) for number in range(24)]
    for number, key in enumerate(keys):
        features = torch.full((500, 4, 512), float(number), device=device, dtype=torch.bfloat16)
        cache.put(key, features)
        del features
        torch.full((500, 4, 512), -1.0, device=device, dtype=torch.bfloat16)  # the allocator may give the same memory
    kept = [key for key in keys if key in cache]
    assert kept == keys[:16]  # two slabs of eight; what came first stays
    for number, features in enumerate(cache.take(kept)):
        assert features.device.type == "cuda" and bool((features == number).all())
    assert all(place.is_pinned() for place in cache._kept.values())
