from typing import Any, Literal, Sequence, TypeVar, overload

from ._core import Device as Device, Plan as Plan

__version__: str
__all__ = ["Device", "Plan", "attend", "devices", "explain", "merge", "plan"]

_Array = TypeVar("_Array")  # numpy.ndarray, torch.Tensor or another object with __dlpack__
_DType = Any  # "float32", "float16", "bfloat16" or a dtype object of those names

@overload
def attend(q: _Array, k: Any, v: Any, *, scale: float | None = None, causal: bool | None = None, window: int | None = 0,
           softcap: float = 0.0, sinks: Any | Sequence[float] | None = None,
           alibi_slopes: Any | Sequence[float] | None = None, mask: Any | None = None,
           mask_slopes: Any | Sequence[float] | None = None, kv_lens: Any | Sequence[int] | None = None,
           kv_starts: Any | Sequence[int] | None = None, kv_layout: str = "BHSD", block_table: Any | None = None,
           segments: Any | None = None, v_is_k_prefix: bool = False, k_format: _DType | None = None,
           v_format: _DType | None = None, k_scales: Any | None = None, k_biases: Any | None = None,
           v_scales: Any | None = None, v_biases: Any | None = None, chunk_tokens: int | None = None,
           out: Any | None = None, out_dtype: _DType | None = None, return_lse: Literal[False] = False,
           threads: int | None = None, target: str | None = None, policy: str | None = None,
           stream: int | None = None) -> _Array: ...
@overload
def attend(q: _Array, k: Any, v: Any, *, scale: float | None = None, causal: bool | None = None, window: int | None = 0,
           softcap: float = 0.0, sinks: Any | Sequence[float] | None = None,
           alibi_slopes: Any | Sequence[float] | None = None, mask: Any | None = None,
           mask_slopes: Any | Sequence[float] | None = None, kv_lens: Any | Sequence[int] | None = None,
           kv_starts: Any | Sequence[int] | None = None, kv_layout: str = "BHSD", block_table: Any | None = None,
           segments: Any | None = None, v_is_k_prefix: bool = False, k_format: _DType | None = None,
           v_format: _DType | None = None, k_scales: Any | None = None, k_biases: Any | None = None,
           v_scales: Any | None = None, v_biases: Any | None = None, chunk_tokens: int | None = None,
           out: Any | None = None, out_dtype: _DType | None = None, return_lse: Literal[True],
           threads: int | None = None, target: str | None = None, policy: str | None = None,
           stream: int | None = None) -> tuple[_Array, Any]: ...
@overload
def merge(outs: Sequence[_Array], lses: Sequence[Any]) -> tuple[_Array, Any]: ...
@overload
def merge(outs: _Array, lses: Any) -> tuple[_Array, Any]: ...
def plan(num_q_heads: int, num_kv_heads: int, head_dim_qk: int, max_kv_len: int, *, num_seqs: int = 1,
         q_len: int = 1, head_dim_v: int | None = None, q_dtype: _DType = "float32", k_format: _DType | None = None,
         v_format: _DType | None = None, out_dtype: _DType | None = None, scale: float | None = None,
         causal: bool | None = None, window: int | None = 0, softcap: float = 0.0, has_sinks: bool = False,
         has_alibi: bool = False, mask: str | None = None, mask_dtype: _DType | None = None,
         has_mask_slopes: bool = False, v_is_k_prefix: bool = False, quant_group: int | None = None,
         scales_dtype: _DType | None = None, device: Any = "cpu", chunk_tokens: int | None = None,
         threads: int | None = None, target: str | None = None, policy: str | None = None) -> Plan: ...
def explain(num_q_heads: int, num_kv_heads: int, head_dim_qk: int, max_kv_len: int, *, num_seqs: int = 1,
            q_len: int = 1, head_dim_v: int | None = None, q_dtype: _DType = "float32", k_format: _DType | None = None,
            v_format: _DType | None = None, out_dtype: _DType | None = None, scale: float | None = None,
            causal: bool | None = None, window: int | None = 0, softcap: float = 0.0, has_sinks: bool = False,
            has_alibi: bool = False, mask: str | None = None, mask_dtype: _DType | None = None,
            has_mask_slopes: bool = False, v_is_k_prefix: bool = False, quant_group: int | None = None,
            scales_dtype: _DType | None = None, device: Any = "cpu", chunk_tokens: int | None = None,
            threads: int | None = None, target: str | None = None, policy: str | None = None) -> str: ...
def devices() -> list[Device]: ...
