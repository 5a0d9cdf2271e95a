"""Faults that the tests must notice: name, file, text that stands there once, text to put in its place."""

RUN = "src/cpu/run.cpp"
ATTEND = "src/cpu/attend.hpp"
VALUES = "src/cpu/attend_values.hpp"
SPLIT = "src/cpu/attend_split.hpp"
IN_ORDER = "src/cpu/attend_in_order.hpp"  # one row, prefetch_level 2
DOT = "src/cpu/attend_dot.hpp"  # pair_dot: processors with BF16 dot products
TASK = "src/cpu/task.hpp"
CHUNK = "src/cpu/chunk.hpp"
BIAS = "src/cpu/bias.hpp"
LOAD = "src/cpu/load.hpp"
MERGE = "src/cpu/merge.hpp"
RANGE = "src/shared/token_range.h"
PARTIAL = "src/shared/partial.h"
AFFINE = "src/cpu/affine.hpp"
AVX512 = "src/cpu/simd/avx512_verbs.hpp"
AVX2 = "src/cpu/simd/avx2.hpp"
TENSORS = "src/core/validate_tensors.cpp"
WORK = "src/metal/work.metal.h"
TOKENS = "src/metal/tokens.metal.h"
VECTOR = "src/metal/attend.metal.h"
MATRIX = "src/metal/attend_matrix.metal.h"
CODES = "src/metal/affine.metal.h"
JOIN = "src/metal/join.metal.h"
METAL_MERGE = "src/metal/merge.metal.h"

FAULTS = [
    ("q of the wrong head", RUN, "q_head = item.kv_head * group;", "q_head = item.kv_head;"),
    ("q of sequence 0", RUN, "at(in_.q.data, item.seq * in_.q.seq_stride + q_head", "at(in_.q.data, q_head"),
    ("K and V of sequence 0", RUN, "stride_bytes(format, item.seq * view.seq_stride + item.kv_head", "stride_bytes(format, item.kv_head"),
    ("V by K's head stride", RUN, "t.v = stream_of(in_.v, p_.v_format", "t.v = stream_of({in_.v.data, in_.v.seq_stride, in_.k.head_stride, 0}, p_.v_format"),
    ("scales of sequence 0", RUN, "at(view.data, item.seq * view.seq_stride + item.kv_head", "at(view.data, item.kv_head"),
    ("scales taken for biases", AFFINE, "(biases_, tokens, bias_floats_)", "(scales_, tokens, bias_floats_)"),
    ("scales of the step's first token", AFFINE, "(token - first_token_) * groups_", "0 * (token - first_token_) * groups_"),
    ("scales without gaps", AFFINE, "first + t * side.token_stride, groups_", "first + t * groups_, groups_"),
    ("every group of a row is its first", LOAD, "= dim >> row.group_log2;", "= 0 * dim >> row.group_log2;"),
    ("both tokens by the first one's bias (AVX-512)", AVX512, "broadcast(*lower), 0xff00", "broadcast(*lower), 0x0000"),
    ("out of sequence 0", RUN, "(item.seq * out_.out_seq_stride + q_head", "(q_head"),
    ("lse of the wrong head", RUN, "q_head * out_.lse_head_stride : nullptr", "item.kv_head * out_.lse_head_stride : nullptr"),
    ("strides taken as bytes", RUN, "(base) + elements * bytes", "(base) + elements"),
    ("kv_len of sequence 0", RUN, "in_.kv_lens[seq]", "in_.kv_lens[0]"),
    ("kv_start of sequence 0", RUN, "in_.kv_starts[seq]", "in_.kv_starts[0]"),
    ("window ignored by the kernel", RUN, "t.window = p_.window;", "t.window = 0;"),
    ("causality ignored by the kernel", RUN, "t.causal = p_.causal;", "t.causal = false;"),
    ("chunks overlap", RUN, "chunk_begin + data_.policy.chunk_tokens)}", "chunk_begin + data_.policy.chunk_tokens + 1)}"),
    ("chunks leave a gap", RUN, "chunk_begin + data_.policy.chunk_tokens)}", "chunk_begin + data_.policy.chunk_tokens - 1)}"),
    ("chunks share one partial", RUN, "first_partial(item) + item.chunk * data_.rows_per_stream", "first_partial(item)"),
    ("merged before the last chunk", RUN, "std::memory_order_acq_rel) == 1)", "std::memory_order_acq_rel) == 2)"),
    ("workers share scratch", RUN, "slot * data_.policy.heads_per_step + idx)", "idx)"),
    ("heads of a step share scratch", RUN, "slot * data_.policy.heads_per_step + idx)", "slot * data_.policy.heads_per_step)"),
    ("sink of head 0", RUN, "in_.sinks + q_head", "in_.sinks"),
    ("scale in base e", RUN, "*p_.scale * shared::kLog2e", "*p_.scale"),
    ("causal range one key long", RANGE, "range.end = position + 1;", "range.end = position + 2;"),
    ("causal range from the top left", RANGE, "kv_len - q_len + query_idx", "query_idx"),
    ("window one key wide", RANGE, "range.begin = position - window + 1;", "range.begin = position - window;"),
    ("merged lse in base 2", PARTIAL, "shift + std::log(sum)", "shift + std::log2(sum)"),
    ("empty rows shift by -inf", PARTIAL, "max_lse == -INFINITY ? 0.0F : max_lse", "max_lse"),
    ("partial not divided by its sum", ATTEND, "const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;",
     "const float inverse = sum == 0.0F ? 0.0F : 1.0F;"),
    ("partial lse in base 2", ATTEND, "maximum * shared::kLn2 + ::logf(sum)", "maximum + ::logf(sum)"),
    ("sum not rescaled", ATTEND, "total = S::mul(total, factor);", ""),
    ("o not rescaled", ATTEND, "S::store(o, S::mul(S::load(o), S::broadcast(factors[r])))", "S::store(o, S::load(o))"),
    ("rest of K's dims dropped", ATTEND, "for (; dim < dims; dim += S::width, q_vec", "for (; dim + S::width <= dims; dim += S::width, q_vec"),
    ("rest of V's dims dropped", VALUES, "    if (dim < dims) {\n      for (std::int64_t t", "    if (dim > dims) {\n      for (std::int64_t t"),
    ("odd token dropped", VALUES, "if (tokens_left > 0)", "if (tokens_left > 1)"),
    ("parts of a step by its number of rows", VALUES, "part * part_rows + row;", "part * (part_rows - 1) + row;"),
    ("padding counted as keys", TASK, "scores[i] = -INFINITY;", "scores[i] = 0.0F;"),
    ("one row read past the end", ATTEND, "token + j : num_tokens - 1, token_stride", "token + j : num_tokens, token_stride"),
    ("few-row tiles skip the second half of a pair", ATTEND, "S::fmadd(b, q_b[r], S::fmadd(a, q_a[r], acc[j * kLaneRows + r]))",
     "S::fmadd(a, q_a[r], acc[j * kLaneRows + r])"),
    ("split tiles drop the rest of K's dims", SPLIT, "if (dim < dims) {", "if (dim > dims) {"),
    ("split tiles swap the tokens of a pair", SPLIT, "row[2 * j] + dim, row[2 * j + 1] + dim", "row[2 * j + 1] + dim, row[2 * j] + dim"),
    ("one row in order drops the rest of K's dims", IN_ORDER, "for (; dim < dims; dim += S::width", "for (; dim + S::width <= dims; dim += S::width"),
    ("one row in order skips the second half of a pair", IN_ORDER,
     "S::fmadd(b, S::load(q + pair + S::width), S::fmadd(a, S::load(q + pair), sum))", "S::fmadd(a, S::load(q + pair), sum)"),
    ("scores of a step's parts in the order they were read", IN_ORDER, "acc[part * kRows + i] =", "acc[i * kParts + part] ="),
    ("pair products drop the rest of K's dims", DOT, "if (dim < dims) {", "if (dim > dims) {"),
    ("pair products give every row the first one's q", DOT, "q_offset(task, first_row + r)", "q_offset(task, first_row)"),
    ("pair products skip the last values of q", DOT, "dim + i < task.head_dim_qk ?", "dim + i + 1 < task.head_dim_qk ?"),
    ("a pair of tokens is the same one twice", DOT, "add_tokens(v, v + token_stride, pairs);", "add_tokens(v, v, pairs);"),
    ("pairs drop an odd last token", DOT, "if (num_tokens > 0) add_tokens(v, nullptr, pairs);", ""),
    ("pairs of every row weigh as the first", DOT, "S::broadcast_pair(weights[r])", "S::broadcast_pair(weights[0])"),
    ("pairs of later blocks weigh as the first block's", DOT, "(p + token * p_stride, p_stride, count, pairs)", "(p, p_stride, count, pairs)"),
    ("the half stored twice is the other one", SPLIT, "halves + at, halves + rows * kStored + at, values", "halves + at, halves + rows * kStored, values"),
    ("hidden keys off by one", BIAS, "key >= range.begin && key < range.end ? 0.0F", "key >= range.begin && key <= range.end ? 0.0F"),
    ("runs of unequal visibility", CHUNK, "seen[end] == seen[begin];) ++end;", "seen[end] != 0;) ++end;"),
    ("hidden steps are read", BIAS, "shows == 0 ? Seen::none :", "shows == 0 ? Seen::some :"),
    ("a step that some row sees is skipped", BIAS, "for (std::int64_t row = first_row + 1; row < first_row + num_rows && seen", "for (std::int64_t row = first_row + 1; row < first_row && seen"),
    ("zero entries in 16 bits hide the others", BIAS, "return static_cast<std::uint16_t>(x & 0x7fff);", "return static_cast<std::uint16_t>(x & 0x7c00 ? 0 : 1);"),
    ("mask of the row before", BIAS, "rules.mask == MaskKind::none || task.rules.mask_head_stride == 0", "rules.mask == MaskKind::none || true"),
    ("mask entries in base e", BIAS, "values[t] * slope * shared::kLog2e;", "values[t] * slope;"),
    ("slope before -inf", BIAS, "bias[t * lanes + r] = hidden ? -INFINITY :", "bias[t * lanes + r] ="),
    ("softcap of padding counts as keys", BIAS, "  hide_padding(scores, floats, S::width);\n}", "}"),
    ("ALiBi from the first row's position", BIAS, "task.kv_len - task.q_len + row / task.group_size;", "task.kv_len - task.q_len;"),
    ("ALiBi slope of head 0", BIAS, "rules.alibi_slopes[row % task.group_size]", "rules.alibi_slopes[0]"),
    ("mask of sequence 0", RUN, "item.seq * in_.mask_seq_stride + q_head", "q_head"),
    ("mask slopes of head 0", RUN, "in_.mask_slopes + q_head", "in_.mask_slopes"),
    ("tree over the oldest keys", RUN, "tree ? kv_len(item.seq) - p_.q_len : 0;", "0;"),
    ("hidden NaN added to -inf (AVX-512)", AVX512, "_mm512_mask_add_ps(b, _mm512_cmp_ps_mask(b, broadcast(-__builtin_inff()), _CMP_NEQ_UQ), a, b)", "add(a, b)"),
    ("second half of a block without its scale (AVX-512)", AVX512, "b = mul(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1))), scale);",
     "b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1)));"),
    ("both tokens by the first one's scale (AVX-512)", AVX512, "scale_of(p0), 0xff00,", "scale_of(p0), 0x0000,"),
    ("high nibbles taken for low ones (AVX2)", AVX2, "first == 0 ? bytes : _mm_srli_epi16(bytes, 4)", "bytes"),
    ("every block of a row is its first", LOAD, "row + static_cast<std::uint64_t>(dim) / shared::kGgmlBlockValues", "row"),
    ("K offsets in 32 bits", CHUNK, "token * task_.k_token_stride * bytes_of", "static_cast<std::int32_t>(token * task_.k_token_stride) * bytes_of"),
    ("lanes of a row left out of its sum", CHUNK, "lane = r; lane < S::width; lane += stride", "lane = r; lane < stride; lane += stride"),
    ("merge keeps the last weight only", MERGE, "sum += weights[c];", "sum = weights[c];"),
    ("merge ignores the sink", MERGE, "float sum = ::expf(sink - shift);", "float sum = 0.0F;"),
    ("merge leaves out chunk 0", MERGE, "for (std::int64_t c = 0; c < task.num_chunks; ++c) {\n      acc", "for (std::int64_t c = 1; c < task.num_chunks; ++c) {\n      acc"),
    ("merge() does not normalise", "src/core/merge.cpp", "- shift) * inverse;", "- shift);"),
    ("workspace for one chunk", "src/cpu/plan.cpp", "WorkspaceBuilder::product(rows, data.max_chunks)", "WorkspaceBuilder::product(rows, 1)"),
    ("hidden keys wake threads", RUN, "std::max<std::int64_t>(0, keys.end - keys.begin)", "kv_len(seq)"),
    ("a length above the capacity is taken", TENSORS, "kv_len < 0 || kv_len > most)", "kv_len < 0)"),
    ("padding beyond the length is taken", TENSORS, "in.kv_starts[s] < 0 || in.kv_starts[s] > kv_len", "in.kv_starts[s] < 0"),
    ("AVX-512 exponential loses NaN", AVX512, "max(broadcast(-160.0F), x)", "max(x, broadcast(-160.0F))"),
    ("AVX-512 odd bf16 values lose four bits", AVX512, "0xffff0000U", "0xfff00000U"),
    ("AVX2 bf16 dims stored in the wrong order", AVX2, "_mm256_unpacklo_ps(a, b);\n    const Vec high", "_mm256_unpacklo_ps(b, a);\n    const Vec high"),
    ("Metal: rows by query token, then head", WORK, "w.q_len) + row / w.q_len;", "w.q_len) + row % (w.num_rows / w.q_len);"),
    ("Metal: K and V of sequence 0", TOKENS, "data + w.seq * strides[0] + w.kv_head", "data + w.kv_head"),
    ("Metal: a part's tokens short of a step dropped", WORK, "part.begin + share : range.end;",
     "part.begin + share : part.begin + (range.end - part.begin) / unit * unit;"),
    ("Metal: causal range one key long", WORK, "range.end = int(position + 1);", "range.end = int(position + 2);"),
    ("Metal: window one key wide", WORK, "range.begin = int(position - w.window + 1);", "range.begin = int(position - w.window);"),
    ("Metal: chunks overlap", WORK, "w.tokens.end = int(begin + chunk_tokens);", "w.tokens.end = int(begin + chunk_tokens) + 1;"),
    ("Metal: mask of head 0", WORK, "at.head * b.mask_strides[1] + ", ""),
    ("Metal: padding of a part counts as keys", VECTOR, "if (w.tokens.end < seen.end) seen.end = w.tokens.end;", ""),
    ("Metal: o not rescaled", VECTOR, "o[row][e] *= row_rescale;", "o[row][e] *= 1.0f;"),
    ("Metal: a hidden key's NaN reaches its row", VECTOR, "if (!w.rows_differ || weight != 0.0f) {", "if (row >= 0) {"),
    ("Metal: pieces overwritten before use", VECTOR, "barrier();  // the piece before has been used", ""),
    ("Metal: both tokens of a lane are the first", MATRIX, "(k, first + 1, dim,", "(k, first, dim,"),
    ("Metal: codes of 8 bits without their bias", CODES, "x[i] = multiply_add(scale, float(byte), bias);", "x[i] = scale * float(byte);"),
    ("Metal: every group of a token has the first one's scale", CODES, "+ dim / kGroup * rows.scales_group_stride]", "+ 0 * rows.scales_group_stride]"),
    ("Metal: parts joined before all are there", JOIN, "    barrier();\n    join_token_parts", "    join_token_parts"),
    ("Metal: merge weighs without the chunk's sum", METAL_MERGE, "exp2_fast(sums[chunk * 2] - high) * sums[chunk * 2 + 1];", "exp2_fast(sums[chunk * 2] - high);"),
    ("Metal: merge ignores the sink", METAL_MERGE, "sum_lanes(sum) + weight_of(sink, high);", "sum_lanes(sum);"),
    ("Metal: lse in base 2", METAL_MERGE, "(high + log2_of(sum)) * KV_LN2", "(high + log2_of(sum))"),
]
