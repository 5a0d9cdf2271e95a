"""How an Apple GPU serves a problem: body, row tile, token chunks, threads. Integers, no device, no other package.

The second form of src/metal/policy.cpp, for installations without a compiler
(docs/decisions/0004-metal-policy-in-two-forms.md); tests/metal/policy_forms_test.py holds the two equal, field by field.
What the numbers mean to the kernels: src/metal/params.h.

    plan = choose(num_q_heads=32, num_kv_heads=4, head_dim_qk=128, max_kv_len=8192, dtype="f16",
                  gpu=gpu_of_architecture(mlx.core.device_info()["architecture"]))
"""
import dataclasses
import re

__all__ = ["BODIES", "Gpu", "Plan", "choose", "gpu_of_architecture"]

VECTOR, MATRIX, PER_HEAD = 1, 2, 3
BODIES = {VECTOR: "vector", MATRIX: "matrix", PER_HEAD: "per_head"}

# Of src/metal/params.h.
LANES = 32
MAX_HEAD_DIM = 512
MAX_TOKEN_PARTS = 16
MAX_ROW_TILES = 16
MAX_MERGE_SIMDGROUPS = 8
JOIN_FLOATS = 2048
STAGE_BYTES = 16384
MAX_SHARED_BYTES = 32768
MIN_SHARED_BYTES = 16384  # what the merge may take

# Tunables; provenance in src/metal/policy.cpp.
SAFE_THREADS = 256
MAX_LIVE_FLOATS = 96
REGISTER_BYTES = 208 * 1024
WANTED_SIMDGROUPS = 24
WAVES = 4
UNKNOWN_CORES = 40
TOKEN_PARTS = 8
PARTIAL_WEIGHT, MOST_PARTIAL_WEIGHT = 16, 4
BARRIER_SLOTS = 40
FIT_START_US, FIT_GBPS, FIT_SLOTS_PER_US, FIT_CORES = 11.14, 283.5, 157500.0, 18.0
MAX_GRID = 2147483647
PARTIAL_SCALARS = 2

_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_CODES_PER_BYTE = {"mlx_int8": 1, "mlx_int4": 2}
_LONG_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# Fields of Policy that this backend knows, and the value that leaves the choice to it.
_ASKED = {"body": 0, "row_tile": 0, "rows_per_worker": 0, "chunk_tokens": 0, "step_tokens": 0, "splits": 0, "simdgroups": 0}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What is known of an Apple GPU.

    family: Metal's GPU family, 7 (M1) to 10 (M5) and later; num_cores: 0 when unknown; threadgroup_bytes: 0 for 32 KB,
    else 16384 or more; max_threads: maxTotalThreadsPerThreadgroup of the pipelines, 0 when unknown; read_gbps:
    measured, 0 when unknown.
    """
    family: int = 7
    num_cores: int = 0
    threadgroup_bytes: int = 0
    max_threads: int = 0
    read_gbps: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to launch. One plan serves every kv_len up to max_kv_len. Counts unless a name says otherwise."""
    kernel_id: str
    body: str  # "vector", "matrix" or "per_head": attend_<body> of src/metal
    row_tile: int  # the template's kRows
    rows_per_worker: int
    row_blocks: int  # blocks of rows_per_worker rows
    read_factor: int  # times each K and V byte is fetched
    row_tiles: int  # params kRowTiles
    token_parts: int  # params kTokenParts
    num_chunks: int  # params kNumChunks
    fixed_chunk_tokens: int  # params kChunkTokens: 0, or what the caller asked for
    chunk_tokens: int  # tokens of a chunk at max_kv_len
    step_tokens: int
    threads: int  # of an attend threadgroup
    threadgroup_bytes: int  # of an attend threadgroup
    threadgroups: tuple  # of attend, x y z; MLX's grid is (threads * x, y, z)
    merge_simdgroups: int  # params kMergeSimdgroups
    merge_threadgroup_bytes: int
    merge_threadgroups: tuple  # MLX's grid is (32 * merge_simdgroups * x, y, z)
    live_floats: int  # per lane, an estimate
    slots: int  # issue slots per 64 (row, token) pairs, an estimate
    workspace_bytes: int  # partial_o and partial_sums
    predicted_us: float  # by a model; nobody has measured this
    rejected: tuple  # "kernel: reason"

    @property
    def kv_format(self):
        """Of K and V: "f16", "mlx_int8", ..."""
        return self.kernel_id.removeprefix(f"attend_metal_{self.body}_").rpartition("_d")[0]


def gpu_of_architecture(architecture, **known):
    """The Gpu of mlx.core.device_info()["architecture"], "applegpu_g16s": by its generation number alone."""
    match = re.match(r"applegpu_g(\d+)", architecture)
    generation = int(match[1]) if match else 13
    # g13 M1, g14 M2, g15 M3, g16 M4, g17 M5; M3 and M4 are one family.
    family = 7 if generation <= 13 else 8 if generation == 14 else 9 if generation <= 16 else generation - 7
    return Gpu(family=family, **known)


def _ceil_div(a, b):
    return -(-a // b)


def _lanes_of(dim):
    return _ceil_div(dim, LANES)


def step_tokens(matrix, row_tile):
    return 16 if matrix else LANES // row_tile


def stage_tokens(matrix, row_tile, dim_qk, dim_v, element_bytes):
    tokens = max(step_tokens(matrix, row_tile), 16)
    while tokens > step_tokens(matrix, row_tile) and tokens * (dim_qk + dim_v) * element_bytes > STAGE_BYTES:
        tokens //= 2
    return tokens


def piece_tokens(matrix, row_tile, dim_qk, dim_v, element_bytes):
    tokens = step_tokens(matrix, row_tile)
    if matrix or tokens * (dim_qk + dim_v) * element_bytes <= MAX_SHARED_BYTES:
        return 0
    while tokens > 1 and tokens * max(dim_qk, dim_v) * element_bytes > STAGE_BYTES:
        tokens //= 2
    return tokens


def stage_floats(matrix, row_tile, dim_qk, dim_v, element_bytes):
    piece = piece_tokens(matrix, row_tile, dim_qk, dim_v, element_bytes)
    if piece:
        return (piece * max(dim_qk, dim_v) * element_bytes + 3) // 4
    return stage_tokens(matrix, row_tile, dim_qk, dim_v, element_bytes) * (dim_qk + dim_v) * element_bytes // 4


def join_rows(token_parts, row_tile, dim_v):
    if token_parts * row_tile * dim_v <= JOIN_FLOATS:
        return row_tile
    return 1 if token_parts * dim_v >= JOIN_FLOATS else JOIN_FLOATS // (token_parts * dim_v)


def shared_floats(matrix, row_tile, dim_qk, dim_v, element_bytes, row_tiles, token_parts):
    if row_tiles > 1:
        return stage_floats(matrix, row_tile, dim_qk, dim_v, element_bytes)
    if token_parts > 1:
        return token_parts * (2 * row_tile + join_rows(token_parts, row_tile, dim_v) * dim_v)
    return 1


@dataclasses.dataclass(frozen=True)
class _Shape:
    rows: int
    dim_qk: int
    dim_v: int
    q_bytes: int  # of an element of q
    staged_bytes: int  # of an element of K and V in threadgroup memory
    token_bytes: int  # of a token's K and V of one head
    affine: bool  # K and V are of one of MLX's quantised formats


def _shape_of(rows, dim_qk, dim_v, dtype, kv_format, quant_group):
    q_bytes, dims = _ELEMENT_BYTES[dtype], dim_qk + dim_v
    if kv_format not in _CODES_PER_BYTE:
        return _Shape(rows, dim_qk, dim_v, q_bytes, q_bytes, dims * q_bytes, False)
    # Codes, and a scale and a bias of q's type per group.
    token_bytes = dims // _CODES_PER_BYTE[kv_format] + 2 * q_bytes * (dims // quant_group)
    return _Shape(rows, dim_qk, dim_v, q_bytes, 4, token_bytes, True)


def _live_floats(body, row_tile, s):
    affine = 8 if s.affine else 0  # scales, biases, codes
    if body == MATRIX:  # o and scores of two 8x8 matrices in float, q in its own type, operands
        return 2 * _ceil_div(s.dim_v, 8) + _ceil_div(_ceil_div(s.dim_qk, 8) * s.q_bytes, 2) + 20 + affine
    scores = 0 if body == PER_HEAD else 32
    lanes_qk, lanes_v = _lanes_of(s.dim_qk), _lanes_of(s.dim_v)
    q_floats = _ceil_div(lanes_qk * s.q_bytes, 4)  # as stored
    return row_tile * (q_floats + lanes_v) + scores + max(lanes_qk, lanes_v) + 8 + affine


def _slots(body, row_tile, row_tiles, s):
    """Issue slots of a simdgroup per 64 (row, token) pairs of full row tiles."""
    dim_qk, dim_v = s.dim_qk, s.dim_v
    lanes_qk, lanes_v = _lanes_of(dim_qk), _lanes_of(dim_v)
    if body == PER_HEAD:
        return 64 * (lanes_qk + 2 * lanes_v + 38)
    if body == MATRIX:
        slots = 35 * (_ceil_div(dim_qk, 8) + _ceil_div(dim_v, 8)) // 2 + 46 + (dim_qk + dim_v) // 8
    else:
        tokens = LANES // row_tile
        slots = 2 * (tokens * (lanes_qk + lanes_v) + 32 * (lanes_qk + lanes_v) + 124 + 3 * (tokens.bit_length() - 1) + 15
                     + row_tile * (2 + lanes_v) + 64 + 11)
    if s.affine:  # a code takes two instructions more than an element
        slots += (dim_qk + dim_v) // 4 if body == MATRIX else 4 * (LANES // row_tile) * (lanes_qk + lanes_v)
    if row_tiles > 1:
        of_stage = (body == MATRIX, row_tile, dim_qk, dim_v, s.staged_bytes)
        piece = piece_tokens(*of_stage)
        staged = step_tokens(body == MATRIX, row_tile) if piece else stage_tokens(*of_stage)
        stages = 2 * staged // piece if piece else 1
        slots += 64 * (staged * (lanes_qk + lanes_v) // row_tiles + stages * BARRIER_SLOTS) // (row_tile * staged)
    return slots


@dataclasses.dataclass
class _Candidate:
    body: int
    row_tile: int
    name: str = ""
    row_tiles: int = 1
    token_parts: int = 1
    row_blocks: int = 1
    live_floats: int = 0
    slots: int = 0
    cost: int = 0
    shared_bytes: int = 4
    refusal: str = ""


def _consider(body, row_tile, s, gpu, asked):
    rows, dim_qk, dim_v = s.rows, s.dim_qk, s.dim_v
    c = _Candidate(body, row_tile)
    matrix = body == MATRIX
    c.live_floats = _live_floats(body, row_tile, s)
    if matrix and (dim_qk % 16 or dim_v % 16):
        c.refusal = "head dims must be multiples of 16"
        return c
    if body == PER_HEAD and s.affine:
        c.refusal = "the baseline serves no quantised caches"
        return c
    if c.live_floats > MAX_LIVE_FLOATS:
        c.refusal = f"{c.live_floats} floats a lane, at most {MAX_LIVE_FLOATS} stay in registers"
        return c
    most_simdgroups = gpu.max_threads // LANES
    tiles = _ceil_div(rows, row_tile)
    if body == PER_HEAD:
        c.row_tiles = min(tiles, asked["simdgroups"] or most_simdgroups, 32)
        c.row_blocks = _ceil_div(tiles, c.row_tiles)
        c.slots = _slots(body, 1, 1, s)
        c.cost = c.slots * rows
        return c
    most_tiles = min(tiles, most_simdgroups, MAX_ROW_TILES)
    if asked["rows_per_worker"]:
        most_tiles = min(most_tiles, max(1, asked["rows_per_worker"] // row_tile))
    if 4 * shared_floats(matrix, row_tile, dim_qk, dim_v, s.staged_bytes, 2, 1) > gpu.threadgroup_bytes:
        most_tiles = 1
    c.row_tiles = _ceil_div(tiles, _ceil_div(tiles, most_tiles))
    c.row_blocks = _ceil_div(tiles, c.row_tiles)
    if c.row_tiles == 1:
        wanted = asked["simdgroups"] or TOKEN_PARTS
        parts = 1
        while (2 * parts <= min(wanted, most_simdgroups, MAX_TOKEN_PARTS) and 2 * parts * dim_v <= JOIN_FLOATS
               and 4 * shared_floats(matrix, row_tile, dim_qk, dim_v, s.staged_bytes, 1, 2 * parts)
               <= gpu.threadgroup_bytes):
            parts *= 2
        c.token_parts = parts
    c.shared_bytes = 4 * shared_floats(matrix, row_tile, dim_qk, dim_v, s.staged_bytes, c.row_tiles, c.token_parts)
    c.slots = _slots(body, row_tile, c.row_tiles, s)
    resident = min(WANTED_SIMDGROUPS, REGISTER_BYTES // (4 * LANES * c.live_floats))
    c.cost = c.slots * c.row_blocks * c.row_tiles * row_tile * WANTED_SIMDGROUPS // resident
    if matrix:
        c.cost = c.cost * 4 // 3
    return c


def _refuse(argument, given, allowed):
    raise ValueError(f"{argument}: got {given}, allowed: {allowed}")


def _require_gpu(gpu):
    if not 7 <= gpu.family <= 99:
        raise RuntimeError(f"device.target: got 'apple{gpu.family}', allowed: apple7 (M1) and later families "
                           "of a backend metal device, as metal_device() gives it")
    if gpu.num_cores < 0:
        _refuse("device.num_sms", gpu.num_cores, "0 (unknown) or the number of GPU cores")
    if gpu.threadgroup_bytes != 0 and gpu.threadgroup_bytes < MIN_SHARED_BYTES:
        _refuse("device.threadgroup_bytes", gpu.threadgroup_bytes, f"0 (32 KB) or at least {MIN_SHARED_BYTES}")
    if gpu.max_threads != 0 and gpu.max_threads < LANES:
        _refuse("device.max_threadgroup_threads", gpu.max_threads, f"0 (unknown) or at least {LANES}")


def _require_asked(asked, gpu):
    def field(name, fits, allowed):
        if not fits:
            _refuse(f"policy.{name}", asked[name], allowed)

    body, tile, simdgroups = asked["body"], asked["row_tile"], asked["simdgroups"]
    field("body", 0 <= body <= 3, "0 (choose), 1 (vector), 2 (matrix) or 3 (per_head)")
    if body == MATRIX:
        field("row_tile", tile in (0, 8), "0 (choose) or 8 for the matrix body")
    elif body == PER_HEAD:
        field("row_tile", tile in (0, 1), "0 (choose) or 1 for the per_head body")
    else:
        field("row_tile", tile in (0, 1, 2, 4, 8, 16), "0 (choose), 1, 2, 4, 8 or 16")
    field("chunk_tokens", asked["chunk_tokens"] == 0 or body != PER_HEAD,
          "0 for the per_head body, whose chunks take every num_chunks-th token")
    field("rows_per_worker", 0 <= asked["rows_per_worker"] <= 256, "0 (choose) to 256")
    field("chunk_tokens", 0 <= asked["chunk_tokens"] <= 1 << 30, "0 (choose) to 2^30 on the metal backend")
    field("splits", 0 <= asked["splits"] <= 65535, "0 (choose) to 65535")
    most = gpu.max_threads // LANES
    field("simdgroups", 0 <= simdgroups <= most,
          f"0 (choose) to {most}: a threadgroup has at most {gpu.max_threads} threads")


def _kernel_id(body, kv_format, s, row_tile):
    return f"attend_metal_{BODIES[body]}_{kv_format}_d{s.dim_qk}x{s.dim_v}_r{row_tile}"


def _candidates(s, kv_format, gpu, asked):
    found = []
    for body, tiles in ((VECTOR, (1, 2, 4, 8, 16)), (MATRIX, (8,)), (PER_HEAD, (1,))):
        for tile in tiles:
            c = _consider(body, tile, s, gpu, asked)
            c.name = _kernel_id(body, kv_format, s, tile)
            if not c.refusal and asked["body"] not in (0, body):
                c.refusal = f"policy.body is {asked['body']}"
            elif not c.refusal and asked["row_tile"] not in (0, tile):
                c.refusal = f"policy.row_tile is {asked['row_tile']}"
            elif not c.refusal and body == PER_HEAD and asked["body"] == 0:
                c.refusal = "the baseline, which reads K and V once per row; policy.body=3 asks for it"
            found.append(c)
    return found


def _pick(candidates, rows, asked):
    chosen = None
    for c in candidates:
        if not c.refusal and (chosen is None or (c.row_blocks, c.cost) < (chosen.row_blocks, chosen.cost)):
            chosen = c
    rejected = []
    for c in candidates:
        if c is chosen:
            continue
        if not c.refusal:
            c.refusal = (f"read factor {c.row_blocks}, the chosen one has {chosen.row_blocks}"
                         if c.row_blocks > chosen.row_blocks else
                         f"estimated cost {c.cost // rows}, the chosen one {chosen.cost // rows} (issue slots per 64 "
                         "row-token pairs, weighed)")
        rejected.append(f"{c.name}: {c.refusal}")
    if chosen is None:
        _refuse("policy", ",".join(f"{name}={asked[name]}" for name in ("body", "row_tile") if asked[name]),
                "a body and a row tile for these head dims: " + "; ".join(rejected))
    return chosen, tuple(rejected)


def choose(*, num_q_heads, num_kv_heads, head_dim_qk, max_kv_len, num_seqs=1, q_len=1, head_dim_v=None, dtype="f16",
           kv_format=None, quant_group=64, window=0, gpu=Gpu(), policy=None):
    """Decides for q, K and V of one dtype (f32, f16 or bf16). The problem is valid: heads >= 1, q_len 0 to 64, ...

    kv_format: "mlx_int8" or "mlx_int4" for K and V in MLX's affine formats, with a scale and a bias of q's dtype per
    quant_group values; None: of q's dtype.
    policy: a dict of some of body, row_tile, rows_per_worker, chunk_tokens, step_tokens, splits, simdgroups; 0: choose.
    Raises ValueError for a policy that cannot be, NotImplementedError for a problem that the kernels do not serve.
    """
    _require_gpu(gpu)
    dtype = _LONG_NAMES.get(dtype, dtype)
    dim_qk, dim_v = head_dim_qk, head_dim_v or head_dim_qk
    for name, dim in (("head_dim_qk", dim_qk), ("head_dim_v", dim_v)):
        if dim > MAX_HEAD_DIM:
            raise NotImplementedError(f"{name} {dim} is not served by the metal backend yet; use dims up to 512")
    if kv_format in _CODES_PER_BYTE:
        for name, dim in (("head_dim_qk", dim_qk), ("head_dim_v", dim_v)):
            if dim % 64:
                raise NotImplementedError(f"{name} {dim} with a quantised cache is not served by the metal backend yet; "
                                          "use a multiple of 64")
    gpu = dataclasses.replace(gpu, threadgroup_bytes=min(gpu.threadgroup_bytes or MAX_SHARED_BYTES, MAX_SHARED_BYTES),
                              max_threads=min(gpu.max_threads, 1024) if gpu.max_threads else SAFE_THREADS)
    asked = dict(_ASKED)
    for name, value in (policy or {}).items():
        if name not in asked:
            _refuse("policy", f"key {name!r}", ", ".join(_ASKED))
        asked[name] = value
    _require_asked(asked, gpu)
    rows = max(1, num_q_heads // num_kv_heads * q_len)
    shape = _shape_of(rows, dim_qk, dim_v, dtype, kv_format, quant_group)
    c, rejected = _pick(_candidates(shape, kv_format or dtype, gpu, asked), rows, asked)
    step = 1 if c.body == PER_HEAD else step_tokens(c.body == MATRIX, c.row_tile)
    if asked["step_tokens"] not in (0, step):
        _refuse("policy.step_tokens", asked["step_tokens"], f"0 (choose) or {step} for {c.name}")
    worker_rows = 1 if c.body == PER_HEAD else c.row_tile * c.row_tiles
    if asked["rows_per_worker"] not in (0, worker_rows):
        _refuse("policy.rows_per_worker", asked["rows_per_worker"],
                f"0 (choose) or {worker_rows} for {c.name} and {rows} rows")
    if asked["simdgroups"] not in (0, max(c.row_tiles, c.token_parts)):
        _refuse("policy.simdgroups", asked["simdgroups"],
                f"0 (choose) or {max(c.row_tiles, c.token_parts)} for {c.name} and {rows} rows")
    return _finish(c, rejected, shape, step, num_seqs, num_q_heads, num_kv_heads, q_len, max_kv_len, window, gpu, asked)


def _chunks(c, shape, step, streams, tokens, gpu, asked):
    if asked["splits"]:
        return asked["splits"]
    block_rows = min(shape.rows, c.row_tile * c.row_tiles)
    simdgroups = max(c.row_tiles, c.token_parts) * max(1, streams * c.row_blocks)

    def goal(per_core, weight):
        least = _ceil_div(weight * 4 * block_rows * (shape.dim_v + PARTIAL_SCALARS), shape.token_bytes)
        wanted = _ceil_div((gpu.num_cores or UNKNOWN_CORES) * per_core, simdgroups)
        return min(wanted, _ceil_div(tokens, max(least, c.token_parts * step)))

    chunks = max(goal(WANTED_SIMDGROUPS * WAVES, PARTIAL_WEIGHT), goal(WANTED_SIMDGROUPS, MOST_PARTIAL_WEIGHT))
    return min(max(1, chunks), 65535)


def _finish(c, rejected, shape, step, num_seqs, num_q_heads, num_kv_heads, q_len, max_kv_len, window, gpu, asked):
    rows, dim_v = shape.rows, shape.dim_v
    tokens = min(max_kv_len, window + q_len - 1) if window else max_kv_len
    fixed = asked["chunk_tokens"]
    if fixed:
        chunks = max(1, _ceil_div(max_kv_len, fixed))
    else:
        chunks = _chunks(c, shape, step, num_seqs * num_kv_heads, tokens, gpu, asked)
    merge_simdgroups = max(1, min(MAX_MERGE_SIMDGROUPS, gpu.max_threads // LANES, chunks // 4))
    threads = LANES * max(c.row_tiles, c.token_parts)
    out_rows = num_seqs * num_q_heads * q_len
    for name, count, instead in (("token chunks times threads", chunks * threads, "choose larger chunk_tokens"),
                                 ("num_kv_heads times row blocks", num_kv_heads * c.row_blocks, "run fewer heads at a time"),
                                 ("rows of all sequences times threads of the merge", out_rows * LANES * merge_simdgroups,
                                  "run fewer sequences at a time")):
        if count > MAX_GRID:
            raise NotImplementedError(f"{name} {count} is not served by the metal backend yet; {instead}")
    workspace = out_rows * chunks * (dim_v + PARTIAL_SCALARS) * 4
    if workspace > 1 << 62:
        _refuse("workspace", "more than 2^62 bytes", "fewer sequences, heads or max_kv_len, or larger chunk_tokens")
    per_head = c.body == PER_HEAD
    worker_rows = 1 if per_head else c.row_tile * c.row_tiles
    read_factor = rows if per_head else c.row_blocks
    padded = rows if per_head else c.row_blocks * worker_rows
    streams = float(num_seqs * num_kv_heads) * float(tokens)
    read_bytes = streams * float(shape.token_bytes)
    partial_bytes = 2.0 * float(workspace)
    bytes_us = (read_bytes + partial_bytes) / ((gpu.read_gbps if gpu.read_gbps > 0.0 else FIT_GBPS) * 1e3)
    slots_us = streams * float(padded) * float(c.slots) / 64.0 / (
        FIT_SLOTS_PER_US * (float(gpu.num_cores) if gpu.num_cores > 0 else FIT_CORES) / FIT_CORES)
    return Plan(
        kernel_id=c.name, body=BODIES[c.body], row_tile=c.row_tile, rows_per_worker=worker_rows,
        row_blocks=c.row_blocks, read_factor=read_factor, row_tiles=c.row_tiles, token_parts=c.token_parts,
        num_chunks=chunks, fixed_chunk_tokens=fixed, chunk_tokens=fixed or max(1, _ceil_div(max_kv_len, chunks)),
        step_tokens=step, threads=threads, threadgroup_bytes=c.shared_bytes,
        threadgroups=(chunks, num_kv_heads * c.row_blocks, num_seqs), merge_simdgroups=merge_simdgroups,
        merge_threadgroup_bytes=4 * merge_simdgroups * dim_v, merge_threadgroups=(out_rows, 1, 1),
        live_floats=c.live_floats, slots=c.slots, workspace_bytes=workspace,
        predicted_us=FIT_START_US + max(bytes_us, slots_us), rejected=rejected)
