"""Transformers' DynamicCache with room to grow: new tokens are written in place, nothing else is copied per token.

DynamicCache joins old and new tokens by torch.cat, which copies all K and V in every step. Here a layer holds K and V as views of
buffers [num_seqs, num_kv_heads, capacity, head_dim], tokens of a head side by side, and writes behind them. What it has returned stays
as it was until crop() takes tokens back, whose place later tokens get.

The buffers are private to a layer, and used only while layer.keys and layer.values are what it put there: whoever sets those, Transformers'
own methods among them, makes the next step copy, as DynamicCache does in each.
"""
from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import DynamicCache, cache_utils

MIN_SPARE_TOKENS = 256
SPARE_DIVISOR = 4  # a token is copied fewer than 5 times while the cache grows; a quarter of the memory may lie idle


def _empty(like: torch.Tensor, capacity: int) -> torch.Tensor:
    """Huge pages gain nothing here (madvise: 0.498 ms for 11.5 MB, torch's own pages 0.500), and begins at 2 MB cost 15 %."""
    shape = (*like.shape[:2], capacity, like.shape[3])
    with torch.inference_mode(False):  # what is made in inference mode cannot be written to outside of it
        return torch.empty(shape, dtype=like.dtype, device=like.device)


def _kind(states):
    num_seqs, num_kv_heads, _, head_dim = states.shape
    return num_seqs, num_kv_heads, head_dim, states.dtype, states.device


class _Room:
    """Buffers of K and V, each [num_seqs, num_kv_heads, capacity, head_dim].

    end: the token after the newest in them.
    held: layer.keys and layer.values as the layer left them.
    """

    def __init__(self, keys, values, num_tokens, reserve_tokens):
        self.capacity = max(num_tokens + max(MIN_SPARE_TOKENS, num_tokens // SPARE_DIVISOR), reserve_tokens)
        if self.capacity % 256 == 0:  # heads a power of two apart share cache sets: 3 heads of 8192 x 64 float32 took two threads
            self.capacity += 16  # of a Zen 4 EPYC 0.310 ms, with room for 8208 0.287 ms (fastest fiftieth of 300 reads of 7500)
        self.keys, self.values = _empty(keys, self.capacity), _empty(values, self.capacity)
        self.kinds = _kind(keys), _kind(values)
        self.fitted = None  # shapes, dtypes and devices of what fitted last
        self.end = 0
        self.held = None, None

    def fits(self, keys, values):
        """Whether torch.cat would take them, and make nothing of another dtype."""
        given = keys.shape, values.shape, keys.dtype, values.dtype, keys.device, values.device
        if given != self.fitted:
            if (_kind(keys), _kind(values)) != self.kinds or keys.shape[2] != values.shape[2]:
                return False
            self.fitted = given
        return True

    def view(self, begin, num_tokens):
        return self.keys.narrow(2, begin, num_tokens), self.values.narrow(2, begin, num_tokens)

    def write(self, keys, values):
        num_tokens = keys.shape[2]
        self.keys.narrow(2, self.end, num_tokens).copy_(keys)
        self.values.narrow(2, self.end, num_tokens).copy_(values)
        self.end += num_tokens


def _twin(layer, kind, **changes):
    """A layer of that class with the same attributes."""
    twin = kind.__new__(kind)
    twin.__dict__.update(layer.__dict__, **changes)
    return twin


class _Growing:
    """What both kinds of layers have."""

    reserve_tokens = 0
    _room: _Room | None = None

    def _num_held(self):
        return self.keys.shape[2] if self.is_initialized and self.keys.dim() == 4 else 0

    def _owns_room(self):
        room = self._room
        return room is not None and self.keys is room.held[0] and self.values is room.held[1]

    def _append(self, keys, values):
        """K and V with the new tokens behind, or None where Transformers has to join them."""
        num_new, held = keys.shape[2], self._num_held()
        room = self._room
        if not self._owns_room() or room.end + num_new > room.capacity:
            room = _Room(keys, values, held + num_new, self.reserve_tokens)
            if held:
                if not room.fits(self.keys, self.values):
                    return None
                room.write(self.keys, self.values)
        if not room.fits(keys, values):
            return None
        room.write(keys, values)
        self._room = room
        return room.view(room.end - held - num_new, held + num_new)

    def _keep(self, keys, values):
        self.keys, self.values = self._room.held = keys, values

    def _join(self, keys, values, *args, **kwargs):
        self._room = None
        return super().update(keys, values, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        owns, before = self._owns_room(), self.get_seq_length()
        super().crop(tokens_to_remove)
        if owns:
            self._room.end -= before - self.get_seq_length()
            self._room.held = self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        num_tokens = self._num_held()
        if not num_tokens or torch.is_grad_enabled():
            super().reorder_cache(beam_idx)
            return
        room = _Room(self.keys, self.values, num_tokens, self.reserve_tokens)
        made = room.view(0, num_tokens)
        for held, out in zip((self.keys, self.values), made):
            torch.index_select(held, 0, beam_idx.to(held.device), out=out)
        room.end, self._room = num_tokens, room
        self._keep(*made)

    def reset(self) -> None:
        self._room = None
        super().reset()

    def offload(self) -> None:
        self._room = None
        super().offload()

    def __copy__(self):
        self._room = None  # of two that share it neither may write
        return _twin(self, type(self))


def _must_join():
    """Gradients need what was attended to unchanged; compiled code would be compiled anew for every length."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


class GrowingLayer(_Growing, cache_utils.DynamicLayer):
    """A full-attention layer of GrowingCache."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if _must_join():
            return self._join(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        joined = self._append(key_states, value_states)
        if joined is None:
            return self._join(key_states, value_states, *args, **kwargs)
        self._keep(*joined)
        return joined


class GrowingSlidingWindowLayer(_Growing, cache_utils.DynamicSlidingWindowLayer):
    """A sliding-window layer of GrowingCache: the window moves along the buffer, and to the begin of a new one at its end."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        num_new, window = key_states.shape[2], self.sliding_window
        if num_new >= window or _must_join():  # a buffer of the prompt's length would stay for long
            return self._join(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        joined = self._append(key_states, value_states)
        if joined is None:
            return self._join(key_states, value_states, *args, **kwargs)
        self.cumulative_length += num_new
        num_tokens = joined[0].shape[2]
        num_kept = num_tokens if self.record_past else min(num_tokens, window - 1)
        num_seen = min(num_tokens, window - 1 + num_new)
        self._keep(*(one.narrow(2, num_tokens - num_kept, num_kept) for one in joined))
        return tuple(one.narrow(2, num_tokens - num_seen, num_seen) for one in joined)


_GROWING = {cache_utils.DynamicLayer: GrowingLayer, cache_utils.DynamicSlidingWindowLayer: GrowingSlidingWindowLayer}


class GrowingCache(DynamicCache):
    """DynamicCache whose layers write new tokens in place: past_key_values=GrowingCache(config=model.config).

    The arguments are DynamicCache's, and:

    reserve_tokens: tokens that a layer has room for from its first on, if that is more than it would take. Default: a quarter more than
        the first step brings, at least 256 more; full buffers grow by as much again, by one copy.

    Any attention may read it; results are those of DynamicCache. Layers that are neither full nor sliding-window attention (linear,
    indexed) are Transformers' own, and so is every step under gradients or torch.compile.
    """

    def __init__(self, ddp_cache_data: Any = None, config: Any = None, offloading: bool = False,
                 offload_only_non_sliding: bool = False, *, reserve_tokens: int = 0) -> None:
        if isinstance(reserve_tokens, bool) or not isinstance(reserve_tokens, int) or reserve_tokens < 0:
            raise ValueError(f"reserve_tokens: got {reserve_tokens!r}, allowed: an int of at least 0")
        super().__init__(ddp_cache_data, config, offloading, offload_only_non_sliding)
        self.layers = [_twin(layer, _GROWING[type(layer)], reserve_tokens=reserve_tokens) if type(layer) in _GROWING else layer
                       for layer in self.layers]
        if self.layer_class_to_replicate is cache_utils.DynamicLayer:
            self.layer_class_to_replicate = functools.partial(_twin, cache_utils.DynamicLayer(), GrowingLayer,
                                                              reserve_tokens=reserve_tokens)


def use_growing_caches(enabled: bool = True) -> None:
    """Gives the layers of GrowingCache to every DynamicCache that is made from now on with a config, as generate() makes it.

    Whatever the attention implementation: Transformers lets nobody choose the cache of one model or implementation, but looks the class
    of a layer up by its type, to which this is an entry. False puts back what was there.
    """
    for kind, layer in cache_utils.DYNAMIC_LAYER_TYPE_MAPPING.items():
        for plain, growing in _GROWING.items():
            if layer is (plain if enabled else growing):
                cache_utils.DYNAMIC_LAYER_TYPE_MAPPING[kind] = growing if enabled else plain
