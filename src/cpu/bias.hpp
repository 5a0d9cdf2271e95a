// What    Everything between scale * q.k and the softmax: softcap, ALiBi, masks, and which keys a row sees at all.
// Order   score = softcap(scale * q.k) + alibi + mask, all in base 2; a hidden key's score becomes -inf whatever it was.
// Steps   Of a token step a row tile sees all keys as they are (the usual case: nothing here runs after the look at the
//         mask), none (the step's K and V are then not read), or some: `fill_bias` writes what is added to each score, -inf
//         where the row does not see the key, and `change_scores` applies it together with softcap and ALiBi.
// Shapes  mask [q_len][group_size][keys] by its strides; rows that share a query token and a mask row read it once.
// Cost    a step's look at a mask reads its entries once per mask row; a step with entries other than 0 and -inf takes one
//         more pass over the mask and one over the scores.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cpu/simd/unroll.hpp"
#include "cpu/task.hpp"
#include "shared/numeric.h"
#include "shared/partial.h"
#include "shared/token_range.h"

namespace kvonce::cpu {

/// How many keys of a step a row, or every row of a tile, sees with nothing added to their scores.
enum class Seen : std::uint8_t { none, some, all };

// Element types of masks. shows(x): some bit is set unless x hides the key; changes(x): some bit is set unless x shows the key and
// adds nothing; value(x): what is added to the score in natural units. Always inlined: no target may hand the linker a copy.

struct BooleanMask {
  using Stored = std::uint8_t;
  KVONCE_INLINE static std::uint8_t shows(Stored x) { return x; }
  KVONCE_INLINE static std::uint8_t changes(Stored x) { return x == 0 ? 1 : 0; }
  KVONCE_INLINE static float value(Stored x) { return x == 0 ? -INFINITY : 0.0F; }
};

template <DType dtype>
struct AdditiveMask {
  using Stored = std::uint16_t;
  static constexpr std::uint16_t kMinusInfinity = dtype == DType::f16 ? 0xfc00 : 0xff80;
  KVONCE_INLINE static std::uint16_t shows(Stored x) { return static_cast<std::uint16_t>(x ^ kMinusInfinity); }
  KVONCE_INLINE static std::uint16_t changes(Stored x) { return static_cast<std::uint16_t>(x & 0x7fff); }
  KVONCE_INLINE static float value(Stored x) {
    return dtype == DType::f16 ? shared::f16_to_f32(x) : shared::bf16_to_f32(x);
  }
};

template <>
struct AdditiveMask<DType::f32> {
  using Stored = float;
  KVONCE_INLINE static std::uint32_t shows(Stored x) { return x == -INFINITY ? 0 : 1; }
  KVONCE_INLINE static std::uint32_t changes(Stored x) { return x == 0.0F ? 0 : 1; }
  KVONCE_INLINE static float value(Stored x) { return x; }
};

/// Calls function with the mask's element type.
template <class Function>
static void with_mask_elements(const ScoreRules& rules, const Function& function) {
  if (rules.mask != MaskKind::additive) {
    function(BooleanMask{});
  } else if (rules.mask_dtype == DType::f16) {
    function(AdditiveMask<DType::f16>{});
  } else if (rules.mask_dtype == DType::bf16) {
    function(AdditiveMask<DType::bf16>{});
  } else {
    function(AdditiveMask<DType::f32>{});
  }
}

/// Scores change where every key is seen, too.
static inline bool changes_all(const ScoreRules& rules) {
  return rules.softcap_log2e > 0.0F || rules.alibi_slopes != nullptr;
}

/// The keys that row `row` of the stream sees before any mask.
static inline shared::TokenRange visible(const ChunkTask& task, std::int64_t row) {
  return shared::visible_range(row / task.group_size, task.q_len, task.kv_len, task.kv_start, task.causal, task.window);
}

/// The part of `tokens` in row `row`'s range; empty ranges have begin == end.
static inline shared::TokenRange visible_in(const ChunkTask& task, std::int64_t row, const shared::TokenRange& tokens) {
  shared::TokenRange range = visible(task, row);
  if (range.begin < tokens.begin) range.begin = tokens.begin;
  if (range.end > tokens.end) range.end = tokens.end;
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

/// Row `row` sees what the row before it sees: the same query token, and one mask for all heads.
static inline bool sees_as_previous(const ChunkTask& task, std::int64_t row) {
  return row % task.group_size != 0 && (task.rules.mask == MaskKind::none || task.rules.mask_head_stride == 0);
}

/// Elements from the mask's start to row `row`'s entry for key `key`.
static inline std::int64_t mask_offset(const ChunkTask& task, std::int64_t row, std::int64_t key) {
  const ScoreRules& rules = task.rules;
  return row / task.group_size * rules.mask_row_stride + row % task.group_size * rules.mask_head_stride +
         (key - rules.mask_first_key) * rules.mask_token_stride;
}

template <class E>
static Seen scan_mask(const typename E::Stored* entries, std::int64_t stride, std::int64_t count) {
  using Bits = decltype(E::shows(*entries));
  Bits shows = 0;
  Bits changes = 0;
  const auto scan = [&](std::int64_t step) {
    for (std::int64_t i = 0; i < count; ++i) {
      shows = static_cast<Bits>(shows | E::shows(entries[i * step]));
      changes = static_cast<Bits>(changes | E::changes(entries[i * step]));
    }
  };
  if (stride == 1) {
    scan(1);
  } else {
    scan(stride);
  }
  return shows == 0 ? Seen::none : changes == 0 ? Seen::all : Seen::some;
}

static inline Seen seen_by_row(const ChunkTask& task, std::int64_t row, const shared::TokenRange& tokens) {
  const shared::TokenRange range = visible_in(task, row, tokens);
  if (range.begin == range.end) return Seen::none;
  Seen seen = Seen::all;
  const ScoreRules& rules = task.rules;
  const std::int64_t masked = rules.mask_first_key > range.begin ? rules.mask_first_key : range.begin;
  if (rules.mask != MaskKind::none && masked < range.end) {
    with_mask_elements(rules, [&](auto elements) {
      using E = decltype(elements);
      const auto* mask = static_cast<const typename E::Stored*>(rules.mask_entries);
      seen = scan_mask<E>(mask + mask_offset(task, row, masked), rules.mask_token_stride, range.end - masked);
    });
    if (seen == Seen::none && masked > range.begin) seen = Seen::some;  // keys before a tree's are seen
  }
  const bool whole = range.begin == tokens.begin && range.end == tokens.end;
  return seen == Seen::all && !whole ? Seen::some : seen;
}

/// What rows [first_row, first_row + num_rows) see: none or all if every one of them does.
static inline Seen seen_by_rows(const ChunkTask& task, std::int64_t first_row, std::int64_t num_rows,
                                const shared::TokenRange& tokens) {
  const Seen seen = seen_by_row(task, first_row, tokens);
  for (std::int64_t row = first_row + 1; row < first_row + num_rows && seen != Seen::some; ++row) {
    if (!sees_as_previous(task, row) && seen_by_row(task, row, tokens) != seen) return Seen::some;
  }
  return seen;
}

/// The mask of one row over a step in natural units, -inf where the row does not see the key.
static inline void read_mask(const ChunkTask& task, std::int64_t row, const shared::TokenRange& tokens, float* values) {
  const shared::TokenRange range = visible_in(task, row, tokens);
  const ScoreRules& rules = task.rules;
  const std::int64_t masked = rules.mask_first_key > range.begin ? rules.mask_first_key : range.begin;
  for (std::int64_t key = tokens.begin; key < tokens.end; ++key) {
    values[key - tokens.begin] = key >= range.begin && key < range.end ? 0.0F : -INFINITY;
  }
  if (rules.mask == MaskKind::none || masked >= range.end) return;
  with_mask_elements(rules, [&](auto elements) {
    using E = decltype(elements);
    const auto* mask = static_cast<const typename E::Stored*>(rules.mask_entries) + mask_offset(task, row, masked);
    for (std::int64_t key = masked; key < range.end; ++key, mask += rules.mask_token_stride) {
      values[key - tokens.begin] = E::value(*mask);
    }
  });
}

/// What is added to the scores of a tile of `rows` rows over a step, in their layout and in base 2; bit r of seen[token] tells
/// whether row r sees the token.
static inline void fill_bias(const ChunkTask& task, std::int64_t first_row, int rows, const shared::TokenRange& tokens,
                             float* bias, std::uint8_t* seen) {
  const std::int64_t count = tokens.end - tokens.begin;
  const int lanes = lane_rows(rows);
  float values[kMaxStepTokens];
  for (std::int64_t i = 0; i < round_up(count * lanes, kPadFloats); ++i) bias[i] = 0.0F;
  for (std::int64_t t = 0; t < count; ++t) seen[t] = 0;
  for (int r = 0; r < rows; ++r) {
    const std::int64_t row = first_row + r;
    if (r == 0 || !sees_as_previous(task, row)) read_mask(task, row, tokens, values);
    const float slope = task.rules.mask_slopes != nullptr ? task.rules.mask_slopes[row % task.group_size] : 1.0F;
    for (std::int64_t t = 0; t < count; ++t) {
      const bool hidden = values[t] == -INFINITY;  // before the slope: 0 * -inf would be NaN
      bias[t * lanes + r] = hidden ? -INFINITY : values[t] * slope * shared::kLog2e;
      seen[t] = static_cast<std::uint8_t>(seen[t] | (hidden ? 0 : 1 << r));
    }
  }
}

/// tanh: x p(x^2) / q(x^2) on [-9.02, 9.02], fitted to a relative error of 2.1e-8; 3.2e-7 as evaluated.
template <class S>
typename S::Vec tanh(typename S::Vec x) {
  using Vec = typename S::Vec;
  const Vec limit = S::broadcast(-9.02F);
  x = S::max(limit, x);  // keeps NaN
  x = S::sub(S::zero(), S::max(limit, S::sub(S::zero(), x)));
  const Vec u = S::mul(x, x);
  Vec p = S::broadcast(1.3319144e-8F);
  p = S::fmadd(p, u, S::broadcast(2.058354e-5F));
  p = S::fmadd(p, u, S::broadcast(3.4940385e-3F));
  p = S::fmadd(p, u, S::broadcast(1.3379721e-1F));
  p = S::fmadd(p, u, S::broadcast(1.0F));
  Vec q = S::broadcast(7.76205e-7F);
  q = S::fmadd(q, u, S::broadcast(3.283099e-4F));
  q = S::fmadd(q, u, S::broadcast(2.5871089e-2F));
  q = S::fmadd(q, u, S::broadcast(4.6713036e-1F));
  q = S::fmadd(q, u, S::broadcast(1.0F));
  return S::div(S::mul(x, p), q);
}

/// Applies softcap, ALiBi and, unless it is null, `bias` to the scores of a tile of `rows` rows over a step.
template <class S>
void change_scores(const ChunkTask& task, std::int64_t first_row, int rows, const shared::TokenRange& tokens,
                   const float* bias, float* scores) {
  using Vec = typename S::Vec;
  const ScoreRules& rules = task.rules;
  const int lanes = lane_rows(rows);
  const std::int64_t floats = (tokens.end - tokens.begin) * lanes;
  if (rules.softcap_log2e > 0.0F) {
    const Vec cap = S::broadcast(rules.softcap_log2e);
    for (std::int64_t i = 0; i < floats; i += S::width) {
      S::store(scores + i, S::mul(cap, tanh<S>(S::div(S::load(scores + i), cap))));
    }
  }
  if (rules.alibi_slopes != nullptr) {
    float slope[S::width];
    float distance[S::width];  // key position - row position
    for (int lane = 0; lane < S::width; ++lane) {
      const std::int64_t row = first_row + (lane % lanes < rows ? lane % lanes : 0);
      const std::int64_t position = task.kv_len - task.q_len + row / task.group_size;
      slope[lane] = rules.alibi_slopes[row % task.group_size] * shared::kLog2e;
      distance[lane] = static_cast<float>(tokens.begin + lane / lanes - position);
    }
    const Vec tokens_of_a_vector = S::broadcast(static_cast<float>(S::width / lanes));
    Vec at = S::load(distance);
    for (std::int64_t i = 0; i < floats; i += S::width, at = S::add(at, tokens_of_a_vector)) {
      S::store(scores + i, S::fmadd(S::load(slope), at, S::load(scores + i)));
    }
  }
  if (bias != nullptr) {
    for (std::int64_t i = 0; i < floats; i += S::width) {
      S::store(scores + i, S::add_bias(S::load(scores + i), S::load(bias + i)));
    }
  }
  hide_padding(scores, floats, S::width);
}

}  // namespace kvonce::cpu
