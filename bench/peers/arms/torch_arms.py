"""PyTorch on the CPU: scaled_dot_product_attention in two forms, and matrix products over the group."""
import torch
import torch.nn.functional as F

from arms import Arm

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def check_installed(_options, _peer):
    """The import above was the check."""


def arms(problem, options, _peer):
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    group = problem.group_size
    scale = problem.head_dim ** -0.5
    latest = {}

    def tensor(array):
        if problem.dtype == "bf16":
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array)

    def prepare_heads(kv_set):  # q [1, num_q_heads, 1, d], K and V [1, num_kv_heads, kv_len, d]
        return tensor(kv_set.q)[None, :, None, :], tensor(kv_set.k)[None], tensor(kv_set.v)[None]

    def prepare_groups(kv_set):  # q [1, num_kv_heads, group, d]: the group's heads stand where query tokens stand
        q = tensor(kv_set.q).view(1, problem.num_kv_heads, group, problem.head_dim)
        return q, tensor(kv_set.k)[None], tensor(kv_set.v)[None]

    def sdpa(qkv):
        latest["out"] = F.scaled_dot_product_attention(*qkv, enable_gqa=group > 1)

    def sdpa_groups(qkv):
        latest["out"] = F.scaled_dot_product_attention(*qkv)

    def matmul(qkv):
        q, k, v = qkv
        scores = torch.matmul(q * scale, k.transpose(-1, -2))
        latest["out"] = torch.matmul(torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype), v)

    def matmul_f16(qkv):
        """torch has no fast f16 product here: one KV head at a time, converted, is 1.6 to 9 times as fast."""
        q, k, v = (tensor[0] for tensor in qkv)
        heads = []
        for head in range(problem.num_kv_heads):
            scores = F.linear(q[head].float() * scale, k[head].float())
            heads.append(torch.softmax(scores, -1) @ v[head].float())
        latest["out"] = torch.stack(heads)

    def result(_):
        return latest["out"].reshape(problem.num_q_heads, problem.head_dim).float().numpy()

    version = torch.__version__.split("+")[0]
    forms = [("torch_sdpa", "enable_gqa" if group > 1 else "plain", prepare_heads, sdpa),
             ("torch_matmul", "grouped", prepare_groups, matmul_f16 if problem.dtype == "f16" else matmul)]
    if group > 1:
        forms.append(("torch_sdpa_grouped", "group_as_tokens", prepare_groups, sdpa_groups))
    return [Arm(f"{name} {version}", f"{name}_{form}_{problem.dtype}", problem.dtype, prepare, run, result)
            for name, form, prepare, run in forms]
