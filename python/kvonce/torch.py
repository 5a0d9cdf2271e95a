"""Decode attention as an operator of torch: torch.ops.kvonce.attend, and a function with the arguments of torch's own.

The operator mutates nothing, works on CPU and CUDA tensors and in torch.compile(fullgraph=True), whose mode
"reduce-overhead" and torch.cuda.graph may capture it, and computes no gradients.
"""
from __future__ import annotations

import torch
from torch import Tensor

from . import _core

__all__ = ["scaled_dot_product_attention"]

# No argument is for keywords alone: torch takes three microseconds longer to sort seven of them.
_ARGUMENTS = ("(Tensor q, Tensor k, Tensor v, Tensor? kv_lens=None, Tensor? kv_starts=None, Tensor? sinks=None, "
              "float? scale=None, bool causal=True, int window=0, float softcap=0.0, Tensor? mask=None)")
# Layouts that inductor would choose could give the last dim a stride.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides")
              if hasattr(torch.Tag, name))
_library = torch.library.Library("kvonce", "FRAGMENT")
_library.define("attend" + _ARGUMENTS + " -> Tensor", tags=_TAGS)
_library.define("attend.lse" + _ARGUMENTS + " -> (Tensor out, Tensor lse)", tags=_TAGS)

_MASK_DTYPES = torch.bool, torch.float32, torch.float16, torch.bfloat16

# K and V, times q_len, of a call that is too small for a second thread. Between the layers of a model its thread has gone to sleep, and waking it takes
# longer than what it would read: SmolLM2, f32, 2 threads of a Zen 4 EPYC under load, fastest fiftieth and tenth of layers in us with one
# thread and with two: 128 tokens 1533, 1602 and 1561, 1651; 512 tokens 1631, 1746 and 1686, 1803.
_ONE_THREAD_BYTES = 1 << 20

_choices_of_threads: dict[int | None, _core.Choices] = {}


def _run(return_lse, q, k, v, kv_lens, kv_starts, sinks, scale, causal, window, softcap, mask):
    if not torch.is_grad_enabled():  # a parameter may be used where no gradient is asked for
        q, k, v, sinks, mask = (tensor.detach() if tensor is not None and tensor.requires_grad else tensor
                                for tensor in (q, k, v, sinks, mask))
    if q.is_cuda:
        threads = None
    elif (k.nbytes + v.nbytes) * q.shape[-2] < _ONE_THREAD_BYTES:
        threads = 1
    else:
        threads = torch.get_num_threads()
    choices = _choices_of_threads.get(threads)
    if choices is None:
        choices = _choices_of_threads[threads] = _core.Choices(None, threads, None, None)
    return _core.attend(q, k, v, scale, causal, window, softcap, sinks, kv_lens, kv_starts, False, None, None,
                        return_lse, None, choices, None, mask)


def _attend(q, k, v, kv_lens=None, kv_starts=None, sinks=None, scale=None, causal=True, window=0, softcap=0.0,
            mask=None):
    return _run(False, q, k, v, kv_lens, kv_starts, sinks, scale, causal, window, softcap, mask)


def _attend_lse(q, k, v, kv_lens=None, kv_starts=None, sinks=None, scale=None, causal=True, window=0, softcap=0.0,
                mask=None):
    return _run(True, q, k, v, kv_lens, kv_starts, sinks, scale, causal, window, softcap, mask)


def _attend_fake(q, k, v, *_, **__):
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _attend_lse_fake(q, k, v, *_, **__):
    return _attend_fake(q, k, v), q.new_empty(q.shape[:3], dtype=torch.float32)


for _key in ("CPU", "CUDA"):
    _library.impl("attend", _attend, _key)
    _library.impl("attend.lse", _attend_lse, _key)
torch.library.register_fake("kvonce::attend", _attend_fake, lib=_library)
torch.library.register_fake("kvonce::attend.lse", _attend_lse_fake, lib=_library)
_attend, _attend_lse = torch.ops.kvonce.attend.default, torch.ops.kvonce.attend.lse


def _refuse(argument, given, allowed):
    raise ValueError(f"{argument}: got {given}, allowed: {allowed}")


def _require_tensor(name, tensor, query):
    if not isinstance(tensor, Tensor):
        _refuse(name, f"an object of type {type(tensor).__name__}", f"a tensor on {query.device}, query's device")
    if tensor.device != query.device:
        _refuse(name, f"a tensor on {tensor.device}", f"one on {query.device}, query's device")
    if tensor.requires_grad and torch.is_grad_enabled():
        _refuse(name, "a tensor with requires_grad",
                "one without, or a call under torch.no_grad(): no gradients are computed")


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
                                 dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = True, *, kv_lens: Tensor | None = None,
                                 kv_starts: Tensor | None = None, window: int = 0, softcap: float = 0.0,
                                 sinks: Tensor | None = None,
                                 return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """torch.nn.functional.scaled_dot_product_attention for a few query tokens, each K and V byte read once.

    is_causal is aligned bottom-right: the newest query token sees every key, the one before it a key less. torch's is
    aligned top-left: there the first query token sees the first key only. They agree where q_len equals kv_len.

    query: [num_seqs, num_q_heads, q_len, head_dim_qk], q_len 0 to 64; float32, float16 or bfloat16.
    key: [num_seqs, num_kv_heads, kv_len, head_dim_qk], not repeated; num_q_heads is a multiple of num_kv_heads.
    value: [num_seqs, num_kv_heads, kv_len, head_dim_v]. Elements of the last dim lie side by side in all three.
    attn_mask: broadcastable to [num_seqs, num_q_heads, q_len, kv_len]; bool, False hides the key, or float32, float16
        or bfloat16, added to the scaled score, whatever query's dtype is. A hidden key's K and V are never multiplied: NaN
        there stays there. Not with is_causal, as in torch; not on CUDA yet (NotImplementedError).
    dropout_p: 0.0.
    is_causal: False: every query token sees every key that attn_mask shows.
    scale: of q.k; default head_dim_qk ** -0.5.
    enable_gqa: False refuses a num_q_heads other than num_kv_heads, as torch does.
    kv_lens: [num_seqs] tokens that count, 0 to kv_len; int32, on the CPU int64 too. Default: all of key. On CUDA it is
        read when the work runs, so that replays of a graph see new lengths; what exceeds kv_len counts as kv_len.
    kv_starts: [num_seqs] tokens of left padding that are skipped.
    window: newest keys that a query token sees, itself included; 0: all.
    softcap: above 0, a score becomes softcap * tanh(score / softcap); not on CUDA yet (NotImplementedError).
    sinks: [num_q_heads], one extra logit per query head without a value; float32.

    Tensors are on one device; on CUDA the work is enqueued on the current stream, and one call before a graph captures
    the next makes what the graph needs outside of it. On the CPU as many threads work as torch.get_num_threads() says, on less than 1 MB of K and V times q_len one.
    Returns out,
    [num_seqs, num_q_heads, q_len, head_dim_v] of query's dtype, contiguous; with return_lse (out, lse), lse float32
    [num_seqs, num_q_heads, q_len], the natural logarithm of the sum of exponentials. A row that sees no key has out 0
    and lse -inf. Messages of what the operator itself checks name query, key, value and attn_mask q, k, v and mask.
    """
    if dropout_p != 0.0:
        _refuse("dropout_p", dropout_p, "0.0")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _require_tensor(name, tensor, query)
        if tensor.dim() != 4:
            _refuse(name, f"{tensor.dim()} dims", "4: [num_seqs, heads, tokens, head_dim]")
    if attn_mask is not None:
        _require_tensor("attn_mask", attn_mask, query)
        if is_causal:
            _refuse("attn_mask", "a tensor with is_causal=True", "one with is_causal=False, or None")
        if attn_mask.dtype not in _MASK_DTYPES:
            _refuse("attn_mask", f"dtype {attn_mask.dtype}", ", ".join(map(str, _MASK_DTYPES)))
    for name, vector in (("kv_lens", kv_lens), ("kv_starts", kv_starts), ("sinks", sinks)):
        if vector is not None:
            _require_tensor(name, vector, query)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        _refuse("enable_gqa", f"False for {query.shape[1]} query heads and {key.shape[1]} KV heads", "True")
    operator = _attend_lse if return_lse else _attend
    return operator(query, key, value, kv_lens, kv_starts, sinks, scale, is_causal, window, softcap, attn_mask)
