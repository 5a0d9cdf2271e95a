// Case strings: one attention problem on one line, the same in the command, case files, JSON and documents.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kvonce/problem.hpp"

namespace kvonce::tool {

/// The values of a case string. Not validated beyond their syntax: make_plan has the rules.
struct CaseSpec {
  std::int64_t num_q_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t kv_len = 0;
  std::int64_t q_len = 1;
  std::int64_t num_seqs = 1;
  std::optional<KvFormat> dtype;  // of K and V; absent: the reader's default
  bool causal = true;
  std::optional<KvFormat> v_dtype;  // of V where it differs from K's
  MaskKind mask = MaskKind::none;   // an additive one is of f16
  float softcap = 0.0F;
  bool alibi = false;
  bool sinks = false;
  bool tokens_first = false;  // K and V as [seqs][kv_len][kv_heads][dim] instead of [seqs][kv_heads][kv_len][dim]

  friend bool operator==(const CaseSpec&, const CaseSpec&) = default;
};

/// Parses `32q/4kv d128 kv=32768 q=1 seqs=1 dtype=bf16 v_dtype=q8_0 causal=1 mask=additive softcap=30 alibi=1 sinks=1 layout=nhd`: heads, head dim (`d192x128` when K and V differ) and
/// kv= are required, the rest is optional; tokens in any order, separated by spaces, each at most once.
/// Throws Error{InvalidArgument} naming the token, what was given and what is allowed.
CaseSpec parse_case(std::string_view text);

/// The canonical form: every numeric token, the others only where they differ from
/// their defaults. parse_case(to_string(c)) == c.
std::string to_string(const CaseSpec& spec);

/// The type of q and out beside K and V of `format` where nothing names it: theirs, or f16 beside quantised ones.
DType default_q_dtype(KvFormat format);

/// The Problem of a case, with K and V stored as `spec.dtype` or else `default_format`, q and out in `q_dtype`.
Problem to_problem(const CaseSpec& spec, KvFormat default_format, DType q_dtype);

/// "f32", "bf16", "q8_0", ... to a format; nothing when the name is unknown.
std::optional<KvFormat> parse_format(std::string_view name);

/// The names parse_format knows, for messages: "f32, f16, bf16, ...".
std::string format_names();

}  // namespace kvonce::tool
