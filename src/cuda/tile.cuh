// What a warp holds and does in a step of tokens, on the tensor cores: bf16 and f16, up to 32 rows.
//
// Scores are computed transposed, S^T = K q^T, with 16 tokens as M and 8 rows as N of mma.m16n8k16, and so is the output,
// O^T = V^T P^T, with 16 dims as M: eight rows cost what one costs, and a row's maximum, sum and outputs stay in the same
// lanes. The k index of a product may be permuted if both sides agree, so a lane loads 16 neighbouring bytes of K straight
// from memory into its operands; V needs pairs of tokens in a register, which two byte permutations make.
//
// A lane is (g, t) = (lane / 4, lane % 4). It holds q rows 2t and 2t + 1 of the scores and of the output.
#pragma once

#include <type_traits>

#include "cuda/kv_tile.cuh"
#include "cuda/work.cuh"

namespace kvonce::cuda {

template <typename T, int kDimQk, int kDimV, int kRowTiles, int kTokenTiles, bool kStaged, class K>
struct Tile : KvTile<T, kDimQk, kDimV, kTokenTiles, kStaged> {
  using Kv = KvTile<T, kDimQk, kDimV, kTokenTiles, kStaged>;
  using Kv::g;
  using Kv::kHalfK;
  using Kv::kHalfV;
  using Kv::kPartsK;
  using Kv::kPartsV;
  using Kv::t;
  // More than two tiles of rows or 256 dims leave no registers for q.
  static constexpr bool kSharedQ = kRowTiles > 2 || kStaged;
  static constexpr int kOutTiles = kDimV / 16;
  static constexpr int kRows = kRowTiles * 8;
  // How far (log2) a running maximum may lag behind the scores before the outputs are scaled to a new one. H200, 32q/4kv d128,
  // 32,768 tokens: q_len 4 28.0 us with 0, 25.5 us with 8; q_len 1 20.1 and 20.0. f16 holds probabilities up to 2^15.
  static constexpr float kSlack = 8.0F;

  uint4 q[kSharedQ ? 1 : kRowTiles][kPartsK > 0 ? kPartsK : 1];
  uint2 q_half[kRowTiles];
  const uint4* q_shared;  // [kRowTiles][kPartsK][32 lanes]

  // Scores, then probabilities: (token g, row 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
  float p[kTokenTiles][kRowTiles][4];
  float m[kRowTiles][2];  // running maximum, log2
  float l[kRowTiles][2];  // this lane's part of the sum
  float o[kRowTiles][kOutTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      m[n][0] = m[n][1] = kNoMax;
      l[n][0] = l[n][1] = 0.0F;
#pragma unroll
      for (int i = 0; i < kOutTiles; ++i) o[n][i][0] = o[n][i][1] = o[n][i][2] = o[n][i][3] = 0.0F;
    }
  }

  __device__ __forceinline__ const T* q_row(const AttendParams& params, const BlockWork& w, int row) const {
    const RowPlace place = place_of<K::kPlain>(params, w, row);
    return row_of<T>(first_row<T>(params.q_rows, w.seq, place.head), place.query, params.q_rows.token);
  }

  /// [1] q of the block's rows; rows past the last are zero.
  __device__ __forceinline__ void load_row_tile(const AttendParams& params, const BlockWork& w) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = n * 8 + g;
      const bool has_row = row < w.num_rows;
      const T* const from = q_row(params, w, has_row ? row : 0);
#pragma unroll
      for (int part = 0; part < kPartsK; ++part) {
        q[n][part] = has_row ? load_late(from + 32 * part + 8 * t) : uint4{0, 0, 0, 0};
      }
      if constexpr (kHalfK) q_half[n] = has_row ? load_late_8(from + 32 * kPartsK + 4 * t) : uint2{0, 0};
    }
  }
  /// The same into shared memory, by the whole block.
  __device__ __forceinline__ void share_row_tile(const AttendParams& params, const BlockWork& w, uint4* shared) {
    static_assert(!kSharedQ || !kHalfK);
    constexpr int kPieces = kRowTiles * kPartsK * 32;
    uint4 pieces[(kPieces + K::kThreads - 1) / K::kThreads];
#pragma unroll
    for (int i = 0; i * K::kThreads < kPieces; ++i) {
      const int piece = static_cast<int>(threadIdx.x) + i * K::kThreads;
      const int row = piece / (kPartsK * 32) * 8 + g;
      const bool has_row = piece < kPieces && row < w.num_rows;
      pieces[i] = has_row ? load_late(q_row(params, w, row) + 32 * (piece / 32 % kPartsK) + 8 * t) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i * K::kThreads < kPieces; ++i) {
      const int piece = static_cast<int>(threadIdx.x) + i * K::kThreads;
      if (piece < kPieces) shared[piece] = pieces[i];
    }
    q_shared = shared;
    __syncthreads();
  }
  __device__ __forceinline__ uint4 q_part(int n, int part) const {
    if constexpr (kSharedQ)
      return q_shared[(n * kPartsK + part) * 32 + 4 * g + t];
    else
      return q[n][part];
  }

  /// [2] Scaled scores (log2) of a step's tokens.
  __device__ __forceinline__ void score_tokens(float scale_log2) {
#pragma unroll
    for (int s = 0; s < kTokenTiles; ++s) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        float even[4] = {0.0F, 0.0F, 0.0F, 0.0F};
        float odd[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
        for (int part = 0; part < kPartsK; ++part) {
          const uint4 a = this->key(s, 0, part);
          const uint4 b = this->key(s, 1, part);
          const uint4 rows = q_part(n, part);
          mma(even, a.x, b.x, a.y, b.y, rows.x, rows.y, T());
          mma(odd, a.z, b.z, a.w, b.w, rows.z, rows.w, T());
        }
        if constexpr (kHalfK) {
          const uint2 a = this->key_half(s, 0);
          const uint2 b = this->key_half(s, 1);
          mma(even, a.x, b.x, a.y, b.y, q_half[n].x, q_half[n].y, T());
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) p[s][n][i] = (even[i] + odd[i]) * scale_log2;
      }
    }
  }

  /// Hides the tokens that a row does not see, and those from the block's `end` on.
  __device__ __forceinline__ void hide_tokens(const AttendParams& params, const BlockWork& w, int token, int end) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        RowRange range = range_of(params, w, n * 8 + 2 * t + j);
        range.end = min(range.end, end);
#pragma unroll
        for (int s = 0; s < kTokenTiles; ++s) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int at = token + 16 * s + g + 8 * i;
            if (at < range.begin || at >= range.end) p[s][n][2 * i + j] = -INFINITY;
          }
        }
      }
    }
  }

  /// The same where every row sees the whole cache.
  __device__ __forceinline__ void hide_tail(int token, int end) {
#pragma unroll
    for (int s = 0; s < kTokenTiles; ++s) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (token + 16 * s + g + 8 * (i / 2) >= end) p[s][n][i] = -INFINITY;
        }
      }
    }
  }

  /// [3] Running maximum and probabilities, at most 2^kSlack. kOnly: there is no other step.
  template <bool kOnly>
  __device__ __forceinline__ void update_softmax() {
    float high[kRowTiles][2];
    bool grows = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        high[n][j] = fmaxf(p[0][n][j], p[0][n][2 + j]);
#pragma unroll
        for (int s = 1; s < kTokenTiles; ++s) high[n][j] = fmaxf(high[n][j], fmaxf(p[s][n][j], p[s][n][2 + j]));
        grows = grows || high[n][j] > m[n][j] + kSlack;
      }
    }
    if (kOnly || __any_sync(kAllLanes, grows)) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int step = 4; step < 32; step *= 2) {
            high[n][j] = fmaxf(high[n][j], __shfl_xor_sync(kAllLanes, high[n][j], step));
          }
          const float now = fmaxf(m[n][j], high[n][j]);
          const float f = exp2_approx(m[n][j] - now);
          m[n][j] = now;
          if constexpr (kOnly) continue;
          l[n][j] *= f;
#pragma unroll
          for (int i = 0; i < kOutTiles; ++i) {
            o[n][i][j] *= f;
            o[n][i][2 + j] *= f;
          }
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kTokenTiles; ++s) {
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p[s][n][i] = exp2_approx(p[s][n][i] - m[n][i & 1]);
        l[n][0] += p[s][n][0] + p[s][n][2];
        l[n][1] += p[s][n][1] + p[s][n][3];
      }
    }
  }

  // Probabilities as the operand of a product with V.
  __device__ __forceinline__ void pack_probabilities(int s, std::uint32_t (&low)[kRowTiles],
                                                     std::uint32_t (&high)[kRowTiles]) const {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      low[n] = transpose_8x8(pack(p[s][n][0], p[s][n][1], T()));
      high[n] = transpose_8x8(pack(p[s][n][2], p[s][n][3], T()));
    }
  }

  /// [4] Adds a step's values.
  __device__ __forceinline__ void accumulate_values() {
#pragma unroll
    for (int s = 0; s < kTokenTiles; ++s) {
      std::uint32_t low[kRowTiles];
      std::uint32_t high[kRowTiles];
      pack_probabilities(s, low, high);
      this->for_values(s, [&](int out_tile, std::uint32_t v0, std::uint32_t v1, std::uint32_t v2, std::uint32_t v3) {
        const std::uint32_t a0 = __byte_perm(v0, v1, 0x5410);
        const std::uint32_t a1 = __byte_perm(v0, v1, 0x7632);
        const std::uint32_t a2 = __byte_perm(v2, v3, 0x5410);
        const std::uint32_t a3 = __byte_perm(v2, v3, 0x7632);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) mma(o[n][out_tile], a0, a1, a2, a3, low[n], high[n], T());
      });
    }
  }

  /// Whether some value of the step is NaN or Inf. The same for the whole warp.
  __device__ __forceinline__ bool has_special_values() const {
    constexpr std::uint32_t kExponent = std::is_same_v<T, bf16> ? 0x7f80U : 0x7c00U;
    bool found = false;
    const auto look = [&found](std::uint32_t word) {
      found = found || (word & kExponent) == kExponent || (word >> 16 & kExponent) == kExponent;
    };
#pragma unroll
    for (int s = 0; s < kTokenTiles; ++s) {
      this->for_values(s, [&](int, std::uint32_t v0, std::uint32_t v1, std::uint32_t v2, std::uint32_t v3) {
        look(v0), look(v1), look(v2), look(v3);
      });
    }
    return __any_sync(kAllLanes, found);
  }

  /// [4] where rows see different tokens and a value is NaN or Inf: 0 times it must not reach a row that does not see its
  /// token. One token after the other, added only where it is seen.
  __device__ __forceinline__ void accumulate_apart(const AttendParams& params, const BlockWork& w, int token, int end) {
#pragma unroll
    for (int s = 0; s < kTokenTiles; ++s) {
      std::uint32_t low[kRowTiles];
      std::uint32_t high[kRowTiles];
      pack_probabilities(s, low, high);
#pragma unroll 1
      for (int k = 0; k < 16; ++k) {
        const std::uint32_t half = t != k % 8 / 2 ? 0U : k % 2 == 0 ? 0x0000ffffU : 0xffff0000U;
        const std::uint32_t first = k < 8 ? half : 0U;
        const std::uint32_t second = k < 8 ? 0U : half;
        bool seen[kRowTiles][2];
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const RowRange range = range_of(params, w, n * 8 + 2 * t + j);
            const int at = token + 16 * s + k;
            seen[n][j] = at >= range.begin && at < min(range.end, end);
          }
        }
        this->for_values(s, [&](int out_tile, std::uint32_t v0, std::uint32_t v1, std::uint32_t v2, std::uint32_t v3) {
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
            float sum[4] = {0.0F, 0.0F, 0.0F, 0.0F};
            mma(sum, __byte_perm(v0, v1, 0x5410) & first, __byte_perm(v0, v1, 0x7632) & first,
                __byte_perm(v2, v3, 0x5410) & second, __byte_perm(v2, v3, 0x7632) & second, low[n], high[n], T());
#pragma unroll
            for (int i = 0; i < 4; ++i) o[n][out_tile][i] += seen[n][i % 2] ? sum[i] : 0.0F;
          }
        });
      }
    }
  }

  // The first of the two neighbouring dims that out_tile's fragment holds for this lane.
  __device__ __forceinline__ unsigned dim_of(int out_tile) const {
    if (out_tile < 4 * kPartsV) return 64 * (out_tile / 4) + 8 * g + 2 * (out_tile % 4);
    if (kHalfV && out_tile < 4 * kPartsV + 2) return 64 * kPartsV + 4 * g + 2 * (out_tile - 4 * kPartsV);
    return kDimV - 16 + 2 * g;
  }

  /// [5] This warp's partial to shared memory.
  __device__ __forceinline__ void store_partial(const MergeArea& area, int warp) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) l[n][j] += __shfl_xor_sync(kAllLanes, l[n][j], step);
      }
    }
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = n * 8 + 2 * t;  // row + 1 has the same places
      float* const first = area.x + (warp * kRows + row) * kDimV;
#pragma unroll
      for (int i = 0; i < kOutTiles; ++i) {
        float* const to = first + MergeArea::pair_at(2 * t, dim_of(i));
        *reinterpret_cast<float2*>(to) = make_float2(o[n][i][0], o[n][i][2]);
        *reinterpret_cast<float2*>(to + kDimV) = make_float2(o[n][i][1], o[n][i][3]);
      }
      if (g == 0) {
        float2* const to = area.ml + warp * kRows + row;
        to[0] = make_float2(m[n][0], l[n][0]);
        to[1] = make_float2(m[n][1], l[n][1]);
      }
    }
  }
};

}  // namespace kvonce::cuda
