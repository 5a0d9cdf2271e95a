"""kvonce's functions in the place of MLX's and mlx_lm's."""
import sys
import threading

import mlx.core as mx

from . import _mlx_calls as calls
from ._mlx_transforms import defaults, originals

_PACKAGES = ("mlx", "mlx_lm")

_lock = threading.Lock()
_replaced = []  # (module, name, what was there, what is there now)


class Patch:
    """The end of a with block takes back what its patch() did."""

    def __init__(self, installed):
        self._installed = installed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._installed:
            unpatch()


def _modules():
    """mlx.core.fast, whatever sys.modules calls it, and the imported modules of mlx and mlx_lm."""
    found = {id(mx.fast): mx.fast}
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] in _PACKAGES:
            found[id(module)] = module
    return found.values()


def patch():
    with _lock:
        if _replaced:
            return Patch(False)
        functions = [("attend", mx.fast.scaled_dot_product_attention, calls.patched_attend)]
        base = sys.modules.get("mlx_lm.models.base")
        quantized = getattr(base, "quantized_scaled_dot_product_attention", None)
        if quantized is not None:
            functions.append(("attend_quantized", quantized, calls.patched_attend_quantized))
        for name, original, _ in functions:
            originals[name] = original
        for module in _modules():
            for name, value in list(vars(module).items()):
                for _, original, ours in functions:
                    if value is original:
                        setattr(module, name, ours)
                        _replaced.append((module, name, original, ours))
        return Patch(True)


def unpatch():
    with _lock:
        for module, name, original, ours in _replaced:
            if getattr(module, name, None) is ours:
                setattr(module, name, original)
        _replaced.clear()
        originals.update(defaults)
