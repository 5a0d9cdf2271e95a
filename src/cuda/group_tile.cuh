// What a group of four warps holds and does in a step of tokens, with wgmma: K and V, and the block's q, in shared memory.
//
// Scores are S = q K^T with 64 rows as M, the output O = P V with the probabilities from registers: a row's scores are in four
// lanes of one warp, and so are its outputs.
#pragma once

#include <type_traits>

#include "cuda/kv_tile.cuh"
#include "cuda/ptx_warpgroup.cuh"

namespace kvonce::cuda {

/// What a group of four warps holds. A lane (g, t) has rows g and g + 8 of its warp's 16.
template <typename T, int kDim, int kRows>
struct GroupTile {
  static constexpr int kTokens = group_tokens(kDim);   // of a step
  static constexpr int kPieces = kDim / 8;             // of 16 bytes in a row
  static constexpr int kTileBytes = kTokens * 128;     // of 64 dims
  static constexpr int kOperand = kTokens * kDim * 2;  // bytes of a step's K or V
  static constexpr int kStages = kGroupStages;
  static constexpr float kSlack = 8.0F;  // as in tile.cuh

  float s[kTokens / 64][32];  // scores, then probabilities: tokens 8j + 2t, 8j + 2t + 1 of rows g, g + 8
  float o[kDim / 2];          // dims 8j + 2t, 8j + 2t + 1 of the same rows
  float m[2];                 // running maximum, log2
  float l[2];                 // this lane's part of the sum

  const T* k_base;
  const T* v_base;
  std::uint32_t q_at;     // shared addresses
  std::uint32_t ring_at;  // this group's: [kStages][K, V]
  unsigned group;
  unsigned thread;  // of the group
  unsigned warp;    // of the group
  unsigned g;
  unsigned t;

  __device__ __forceinline__ void open(const AttendParams& params, const BlockWork& w, unsigned char* shared) {
    group = threadIdx.x / 128;
    thread = threadIdx.x % 128;
    warp = thread / 32;
    g = threadIdx.x % 32 / 4;
    t = threadIdx.x % 4;
    k_base = first_row<T>(params.k_rows, w.seq, w.kv_head);
    v_base = first_row<T>(params.v_rows, w.seq, w.kv_head);
    q_at = shared_address(shared);
    ring_at = q_at + kRows * kDim * 2 + group * (kStages * 2 * kOperand);
  }
  __device__ __forceinline__ bool has_rows() const { return warp * 16 < kRows; }
  __device__ __forceinline__ std::uint32_t keys_at(int stage) const { return ring_at + stage * 2 * kOperand; }
  __device__ __forceinline__ std::uint32_t values_at(int stage) const { return keys_at(stage) + kOperand; }

  __device__ __forceinline__ void clear() {
    m[0] = m[1] = kNoMax;
    l[0] = l[1] = 0.0F;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) o[i] = 0.0F;
  }

  /// [1] q of the block's rows, by the whole block; rows past the last are zero.
  template <class K>
  __device__ __forceinline__ void share_rows(const AttendParams& params, const BlockWork& w) const {
    constexpr int kEach = kRows * kPieces / K::kThreads;
    static_assert(kRows * kPieces % K::kThreads == 0);
    uint4 pieces[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * K::kThreads;
      const int row = at / kPieces;
      const RowPlace place = place_of<false>(params, w, row < w.num_rows ? row : 0);
      const T* const from = row_of<T>(first_row<T>(params.q_rows, w.seq, place.head), place.query, params.q_rows.token);
      pieces[i] = row < w.num_rows ? load_late(from + at % kPieces * 8) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const unsigned at = threadIdx.x + i * K::kThreads;
      store_piece(q_at + matrix_piece(kRows, at / kPieces, at % kPieces), pieces[i]);
    }
    show_to_tensor_cores();
    __syncthreads();
  }

  /// A step's rows of K or V, by the group. Tokens past the last are read as the last one.
  __device__ __forceinline__ void load(const T* base, std::int32_t row_bytes, std::uint32_t to, int token,
                                       int end) const {
    constexpr int kTogether = 128 / kPieces;  // rows
    const int row = static_cast<int>(thread / kPieces);
    const unsigned piece = thread % kPieces;
    const std::uint32_t first = to + matrix_piece(kTokens, row, piece);
#pragma unroll
    for (int i = 0; i < kTokens; i += kTogether) {
      copy_piece(first + i * 128, row_of(base, min(token + row + i, end - 1), row_bytes) + piece * 8);
    }
  }
  __device__ __forceinline__ void load_keys(const AttendParams& params, int stage, int token, int end) const {
    if (token < end) load(k_base, params.k_rows.token, keys_at(stage), token, end);
    close_copies();
  }
  __device__ __forceinline__ void load_values(const AttendParams& params, int stage, int token, int end) const {
    if (token < end) load(v_base, params.v_rows.token, values_at(stage), token, end);
    close_copies();
  }
  /// The oldest of the copies are there, for the whole group.
  __device__ __forceinline__ void wait_for_oldest() const {
    wait_for_copies<2 * kStages - 1>();
    show_to_tensor_cores();
    sync_group(group);
  }

  /// [2] Scaled scores (log2) of a step's tokens. The keys are used up then.
  __device__ __forceinline__ void score_tokens(int stage, float scale_log2) {
#pragma unroll
    for (int part = 0; part < kTokens / 64; ++part) hold(s[part]);
    warpgroup_open();
#pragma unroll
    for (int part = 0; part < kTokens / 64; ++part) {
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        const unsigned at = k % 4 * 32;
        warpgroup_mma(s[part], matrix_at(q_at + k / 4 * kRows * 128 + at, 0),
                      matrix_at(keys_at(stage) + k / 4 * kTileBytes + part * 8192 + at, 0), k, T());
      }
    }
    warpgroup_wait();
#pragma unroll
    for (int part = 0; part < kTokens / 64; ++part) hold(s[part]);
    sync_group(group);
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) s[i / 32][i % 32] *= scale_log2;
  }

  /// Of token 8 * eight + 2t + odd.
  __device__ __forceinline__ float& score(int eight, int half, int odd) {
    return s[eight / 8][eight % 8 * 4 + 2 * half + odd];
  }
  __device__ __forceinline__ int row(int half) const { return static_cast<int>(warp * 16 + g) + 8 * half; }

  /// Hides the tokens that a row does not see, and those from the block's `end` on.
  __device__ __forceinline__ void hide_tokens(const AttendParams& params, const BlockWork& w, int token, int end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowRange range = range_of(params, w, row(half));
      range.end = min(range.end, end);
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        const int at = token + i / 2 * 8 + static_cast<int>(2 * t) + i % 2;
        if (at < range.begin || at >= range.end) score(i / 2, half, i % 2) = -INFINITY;
      }
    }
  }

  /// [3] Running maximum and probabilities, at most 2^kSlack.
  __device__ __forceinline__ void update_softmax() {
    float high[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      high[half] = fmaxf(score(0, half, 0), score(0, half, 1));
#pragma unroll
      for (int j = 1; j < kTokens / 8; ++j) {
        high[half] = fmaxf(high[half], fmaxf(score(j, half, 0), score(j, half, 1)));
      }
      grows = grows || high[half] > m[half] + kSlack;
    }
    if (__any_sync(kAllLanes, grows)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          high[half] = fmaxf(high[half], __shfl_xor_sync(kAllLanes, high[half], step));
        }
        const float now = fmaxf(m[half], high[half]);
        const float f = exp2_approx(m[half] - now);
        m[half] = now;
        l[half] *= f;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          o[4 * j + 2 * half] *= f;
          o[4 * j + 2 * half + 1] *= f;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float even = exp2_approx(score(j, half, 0) - m[half]);
        const float odd = exp2_approx(score(j, half, 1) - m[half]);
        score(j, half, 0) = even;
        score(j, half, 1) = odd;
        l[half] += even + odd;
      }
    }
  }

  /// [4] Adds a step's values. They are used up then.
  __device__ __forceinline__ void accumulate_values(int stage) {
    std::uint32_t p[kTokens / 16][4];
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[k][i] = pack(score(2 * k + i / 2, i % 2, 0), score(2 * k + i / 2, i % 2, 1), T());
    }
    hold(o);
    warpgroup_open();
#pragma unroll
    for (int k = 0; k < kTokens / 16; ++k) {
      warpgroup_mma(o, p[k], matrix_at(values_at(stage) + k * 2048, kTileBytes), T());
    }
    warpgroup_wait();
    hold(o);
  }

  /// Whether some value of the step is NaN or Inf. The same for the whole group.
  __device__ __forceinline__ bool has_special_values(int stage) const {
    constexpr std::uint32_t kExponent = std::is_same_v<T, bf16> ? 0x7f80U : 0x7c00U;
    bool found = false;
    const auto look = [&found](std::uint32_t word) {
      found = found || (word & kExponent) == kExponent || (word >> 16 & kExponent) == kExponent;
    };
#pragma unroll
    for (int i = 0; i < kOperand; i += 128 * 16) {
      const uint4 words = read_piece(values_at(stage) + i + thread * 16);
      look(words.x), look(words.y), look(words.z), look(words.w);
    }
    return any_of_group(group, found);
  }

  /// [4] where rows see different tokens and a value is NaN or Inf: 0 times it must not reach a row that does not see its
  /// token. One token after the other, added only where it is seen.
  __device__ __forceinline__ void accumulate_apart(int stage, const AttendParams& params, const BlockWork& w, int token,
                                                   int end) {
    if (!has_rows()) return;
    const RowRange range[2] = {range_of(params, w, row(0)), range_of(params, w, row(1))};
#pragma unroll 1
    for (int k = 0; k < kTokens; ++k) {
      std::uint32_t words[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i) {
        // Not by an index, nor by a choice between two: s stays in registers.
        const std::uint32_t here = i == k / 8 * 2 + k % 2 ? 0xffffffffU : 0U;
        words[0] |= here & __float_as_uint(score(i / 2, 0, i % 2));
        words[1] |= here & __float_as_uint(score(i / 2, 1, i % 2));
      }
      float p[2];
      bool seen[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        p[half] =
            __shfl_sync(kAllLanes, round_to(__uint_as_float(words[half]), T()), static_cast<int>(4 * g) + k % 8 / 2);
        const int at = token + k;
        seen[half] = at >= range[half].begin && at < min(range[half].end, end);
      }
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const std::uint32_t pair = read_word(values_at(stage) + matrix_piece(kTokens, k, j) + 4 * t);
        const float2 v = unpack(pair, T());
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!seen[half]) continue;
          o[4 * j + 2 * half] = fmaf(p[half], v.x, o[4 * j + 2 * half]);
          o[4 * j + 2 * half + 1] = fmaf(p[half], v.y, o[4 * j + 2 * half + 1]);
        }
      }
    }
  }

  /// [5] This group's partial to shared memory.
  __device__ __forceinline__ void store_partial(const MergeArea& area) {
    if (!has_rows()) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2) l[half] += __shfl_xor_sync(kAllLanes, l[half], step);
      const unsigned at = group * kRows + row(half);
      if (t == 0) area.ml[at] = make_float2(m[half], l[half]);
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        float* const to = area.x + at * kDim + MergeArea::wide_at(row(half), 8 * j + 2 * t);
        *reinterpret_cast<float2*>(to) = make_float2(o[4 * j + 2 * half], o[4 * j + 2 * half + 1]);
      }
    }
  }
};

}  // namespace kvonce::cuda
