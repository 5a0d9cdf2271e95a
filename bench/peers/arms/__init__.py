"""The peers: one module each, every module with the functions `check_installed(options, peer)`, which raises
ImportError or OSError, and `arms(problem, options, peer)`; `peer` is the name of the command line.

An arm is an `Arm`; `prepare(kv_set)` does once for every set of buffers what a peer needs (wrapping pointers, binding),
`run(prepared)` is the one timed call and `result(prepared)` gives the output of the latest one.
"""
import dataclasses
from typing import Any, Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Problem:
    """One decode step: one sequence, one new token, all of the cache visible."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_len: int
    dtype: str  # f32, f16 or bf16, of q, K and V

    @property
    def group_size(self):
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_shape(self):
        return (self.num_kv_heads, self.kv_len, self.head_dim)

    @property
    def kv_bytes(self):
        return 2 * int(np.prod(self.kv_shape)) * (4 if self.dtype == "f32" else 2)

    @property
    def case(self):
        return f"{self.num_q_heads}q/{self.num_kv_heads}kv d{self.head_dim} kv={self.kv_len} q=1 seqs=1"


@dataclasses.dataclass(frozen=True)
class KvSet:
    """q [num_q_heads, head_dim]; k and v [num_kv_heads, kv_len, head_dim], packed. bf16 travels as uint16."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclasses.dataclass(frozen=True)
class Arm:
    name: str  # with the peer's version
    kernel: str  # which of the peer's forms
    q_dtype: str
    prepare: Callable[[KvSet], Any]
    run: Callable[[Any], Any]
    result: Callable[[Any], np.ndarray]  # [num_q_heads, head_dim] in any floating dtype
    close: Callable[[], None] = lambda: None
    read_factor: int | None = None  # where it is known


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(values):
    """Rounds to nearest, ties to even; no NaN among the values."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_float(array, dtype):
    return bf16_to_f32(array) if dtype == "bf16" else array
