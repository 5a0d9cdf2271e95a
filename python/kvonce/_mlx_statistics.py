"""What kvonce.mlx counts: calls served, by kernel, and calls that went to MLX, by reason."""
from __future__ import annotations

import collections
import threading
from typing import Any

_lock = threading.Lock()
_served: collections.Counter[str] = collections.Counter()
_fallbacks: collections.Counter[str] = collections.Counter()


def stats() -> dict[str, Any]:
    """{"served": calls, "kernels": {"cpu": calls, ...}, "fallbacks": {reason: calls}} since the last reset_stats().

    A call is one layer of one step. "kernels" sums to "served". Code that mx.compile compiles counts when it is traced.
    """
    with _lock:
        return {"served": sum(_served.values()), "kernels": dict(_served), "fallbacks": dict(_fallbacks)}


def reset_stats() -> None:
    """Starts counting from zero."""
    with _lock:
        _served.clear()
        _fallbacks.clear()


def count_served(kernel):
    with _lock:
        _served[kernel] += 1


def count_fallback(reason):
    with _lock:
        _fallbacks[reason] += 1
