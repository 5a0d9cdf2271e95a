"""attn_implementation="kvonce" for Transformers 5.17 and later.

    import kvonce.transformers
    kvonce.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="kvonce")
    model.generate(...)
    print(kvonce.transformers.stats())

Decode steps go to kvonce: 1 to 64 new tokens after a cache, in causal and sliding-window layers, with DynamicCache and
StaticCache, left-padded batches, sinks and softcap. Everything else goes to Transformers' own sdpa, or to the model's own
eager attention where sdpa knows less (softcap, sinks, position biases, attention weights asked for); stats() says how often
and why.

How: Transformers asks the mask function once per step and kind of layer and hands what it returns to every layer
unread. Here that is a Mask: lengths, and a recipe for the real mask, which is made when a layer falls back.
"""
import collections
import functools
import sys
import threading
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvonce
import kvonce.torch  # defines the operator
from kvonce._transformers_cache import GrowingCache, use_growing_caches

__all__ = ["NAME", "MAX_Q_LEN", "GrowingCache", "Mask", "register", "reset_stats", "stats", "use_growing_caches"]

NAME = "kvonce"  # Transformers treats names that contain "flash" differently
MAX_Q_LEN = 64

_lock = threading.Lock()
_served = 0
_fallbacks: collections.Counter[tuple[str, str]] = collections.Counter()  # (to, reason)


def register() -> None:
    """Makes attn_implementation="kvonce" known to Transformers. May be called again."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < (5, 17):
        raise RuntimeError(f"transformers: got version {transformers.__version__}, allowed: 5.17 and later")
    AttentionInterface.register(NAME, _attention)
    # Without a mask function of the same name Transformers passes no mask at all.
    masking_utils.AttentionMaskInterface.register(NAME, _mask)


def stats() -> dict[str, Any]:
    """{"served": calls, "fallbacks": {"sdpa: reason": calls, "eager: reason": calls}} since the last reset_stats().

    A call is one layer of one step. Code that torch.compile compiles counts when it is traced, a CUDA graph when it is
    captured, neither when it is replayed.
    """
    with _lock:
        return {"served": _served, "fallbacks": {f"{to}: {reason}": calls for (to, reason), calls in _fallbacks.items()}}


def reset_stats() -> None:
    """Starts counting from zero."""
    global _served
    with _lock:
        _served = 0
        _fallbacks.clear()


@torch.compiler.assume_constant_result  # torch.compile calls it while it traces, and compiles nothing of it
def _count(to=None, reason=None):
    global _served
    with _lock:
        if to is None:
            _served += 1
        else:
            _fallbacks[to, reason] += 1
    return 0


def _sees_plain_tensors():
    """Whether nothing traces or transforms what is called. A layer then calls the operator's implementation, not the operator: within
    SmolLM2 at 128 tokens a layer's call takes 50 us instead of 66, sdpa's 49 (f32, one thread of a Zen 4 EPYC, fastest fiftieth)."""
    return not (torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
                or torch._C._functorch.peek_interpreter_stack() is not None)


class Mask:
    """What the mask function gives to the layers in place of a tensor.

    refusal: why no layer may be served, else None.
    window: newest keys that a query token sees, itself included; 0: all.
    kv_lens: int32 [num_seqs], or None when every token of K counts.
    kv_starts: int32 [num_seqs], tokens of left padding, or None.
    """

    ndim = 4  # a model's forward leaves alone what is not 2-D

    def __init__(self, arguments, refusal=None, window=0, kv_lens=None, kv_starts=None):
        self.arguments = arguments  # of Transformers' mask functions
        self.refusal, self.window, self.kv_lens, self.kv_starts = refusal, window, kv_lens, kv_starts
        self.served = set()  # what is known to have a kernel: the layers of a step ask the same
        self.direct = not torch.compiler.is_compiling() and _sees_plain_tensors()
        self._made = {}

    def make(self, to):
        """The mask that sdpa or eager attention wants: made once, then kept for the other layers."""
        if to in self._made:
            return self._made[to]
        arguments = dict(self.arguments)
        if self.kv_lens is not None:  # q_offset may be the cache's own counter, which has moved on
            arguments["q_offset"] = self.kv_lens[0] - arguments["q_length"] + arguments["kv_offset"]
        made = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[to](**arguments)
        if not torch.compiler.is_compiling():
            self._made[to] = made
        return made


def _cells(function):
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))


def _window_of(mask_function):
    """0 of a plain causal mask function, the window of a causal sliding one, None of any other."""
    if mask_function is masking_utils.causal_mask_function:
        return 0
    if mask_function.__qualname__ != "and_masks.<locals>.and_mask":
        return None
    parts = _cells(mask_function)["mask_functions"]
    if (len(parts) == 2 and parts[0].__qualname__ == "sliding_window_overlay.<locals>.inner_mask"
            and parts[1] is masking_utils.causal_mask_function):
        return _cells(parts[0])["sliding_window"]
    return None


def _read_padding(padding, q_end, kv_offset):
    """(refusal, kv_starts) of a bool [num_seqs, num_tokens] tensor, True where a token counts, up to token q_end."""
    if torch.compiler.is_compiling() or padding.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a padding mask cannot be read inside compiled code or while a CUDA graph is captured", None
    reaches = q_end <= padding.shape[1]  # an int's bool or a tensor
    if reaches & padding.all():
        return None, None
    positions = torch.arange(padding.shape[1], device=padding.device)
    starts = padding.int().argmax(dim=1)
    left_only = (padding == (positions >= starts[:, None])) | (positions >= q_end)
    if not reaches & left_only.all():
        return "padding that is not all on the left", None
    return None, (starts - kv_offset).clamp(min=0).int()


def _mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=masking_utils.causal_mask_function,
          attention_mask=None, **options):
    if isinstance(attention_mask, Mask):  # generate() made it before the model's forward
        return attention_mask
    arguments = dict(options, batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                     kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask)
    window = _window_of(mask_function)
    if window is None and ("allow_is_bidirectional_skip" in options or not options.get("allow_is_causal_skip", True)):
        return masking_utils.sdpa_mask(**arguments)  # may be combined with others by the model

    kv_lens = kv_starts = None
    if isinstance(q_offset, torch.Tensor):
        # A new tensor: the cache adds to its counter in place, before the first layer attends.
        kv_lens = (q_offset + (q_length - kv_offset)).int().expand(batch_size).contiguous()
    elif q_offset + q_length - kv_offset < kv_length:
        kv_lens = torch.full((batch_size,), q_offset + q_length - kv_offset, dtype=torch.int32,
                             device=options.get("device", "cpu"))
    if window is None:
        refusal = "a mask that is neither causal nor a causal sliding window"
    elif q_length > MAX_Q_LEN:
        refusal = f"prefill: more than {MAX_Q_LEN} query tokens"
    elif q_length > 1 and isinstance(q_offset, int) and q_offset == 0:
        refusal = "prefill: nothing in the cache yet"
    else:
        refusal = None
        if attention_mask is not None:
            refusal, kv_starts = _read_padding(attention_mask, q_offset + q_length, kv_offset)
    return Mask(arguments, refusal, window, kv_lens, kv_starts)


@functools.lru_cache(maxsize=None)
def _find_unsupported(q_heads_dim, q_dtype, kv_heads_dim, k_dtype, head_dim_v, v_dtype, q_len, softcap, has_sinks, device):
    """Why kvonce has no kernel for layers of this kind, or None."""
    try:
        kvonce.plan(q_heads_dim[0], kv_heads_dim[0], q_heads_dim[1], 1, q_len=q_len, head_dim_v=head_dim_v,
                    q_dtype=q_dtype, k_format=k_dtype, v_format=v_dtype, softcap=softcap, has_sinks=has_sinks, device=device)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return None


@torch.compiler.assume_constant_result
def _unsupported(*kind):
    return _find_unsupported(*kind)


def _refusal(module, query, key, value, mask, options):
    """Why this call does not go to kvonce, or None."""
    if not isinstance(mask, Mask):
        return "no mask" if mask is None else "a mask tensor of the caller or the model"
    if mask.refusal is not None:
        return mask.refusal
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "gradients are wanted"
    if options.get("dropout"):
        return "dropout"
    if options.get("output_attentions"):
        return "attention weights are wanted"
    if options.get("position_bias") is not None:
        return "a position bias"
    if query.shape[2] > 1 and not (module.is_causal if options.get("is_causal") is None else options["is_causal"]):
        return "a layer that is not causal"
    if key.shape[2] != mask.arguments["kv_length"]:
        return "K of another length than the mask's"
    return None


def _attention(module, query, key, value, attention_mask, **options):
    refusal = _refusal(module, query, key, value, attention_mask, options)
    if refusal is None:
        sinks = options.get("s_aux")
        softcap = options.get("softcap") or 0.0
        compiling = torch.compiler.is_compiling()
        kind = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device, softcap, sinks is None
        if compiling or kind not in attention_mask.served:
            refusal = _unsupported(query.shape[1:4:2], query.dtype, key.shape[1:4:2], key.dtype, value.shape[3], value.dtype,
                                   query.shape[2], softcap, sinks is not None, str(query.device))
            if refusal is None and not compiling:
                attention_mask.served.add(kind)
    if refusal is None:
        _count()
        direct = not compiling and attention_mask.direct and type(query) is torch.Tensor
        attend = kvonce.torch._attend if direct else torch.ops.kvonce.attend.default
        out = attend(query, key, value, attention_mask.kv_lens, attention_mask.kv_starts,
                     None if sinks is None else sinks.float(), options.get("scaling"), True, attention_mask.window, softcap)
        return out.transpose(1, 2).contiguous(), None
    # What sdpa ignores or refuses.
    eager = any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")) or options.get(
        "output_attentions")
    to = "eager" if eager else "sdpa"
    _count(to, refusal)
    if isinstance(attention_mask, Mask):
        attention_mask = attention_mask.make(to)
    elif eager and attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = torch.where(attention_mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    if eager:
        attend = sys.modules[type(module).__module__].eager_attention_forward
        return attend(module, query, key, value, attention_mask, **options)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
