// Policy files: which problems take which tunables, as `kvonce tune` writes them and KVONCE_POLICY names them.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kvonce/plan.hpp"

namespace kvonce {

/// One line of a policy file: conditions, all of which must hold, and the tunables that then apply. Nothing here depends
/// on the batch, the cache length or the number of threads, so neither do a row's bits.
struct PolicyRule {
  std::string target;  // of the device; empty: any
  std::optional<DType> q_dtype;
  std::optional<KvFormat> k_format;
  std::optional<KvFormat> v_format;
  std::int64_t min_rows = 0;  // rows that read one KV stream: group_size * q_len, both ends included
  std::int64_t max_rows = std::numeric_limits<std::int64_t>::max();
  std::int64_t min_dims = 0;  // head_dim_qk, both ends included
  std::int64_t max_dims = std::numeric_limits<std::int64_t>::max();
  Policy policy;  // what the line does not name is left to make_plan
  int line = 0;   // in the file, from 1

  /// Whether it applies; rules are about plans of the CPU backend.
  [[nodiscard]] KVONCE_API bool matches(const Problem& problem, const Device& device) const noexcept;
};

/// "target=avx512 k=f16 v=f16 rows=5..8 dims=128: prefetch_lines=1", "any: ..." without conditions. A rule whose policy
/// chooses everything has nothing after its colon.
KVONCE_API std::string to_string(const PolicyRule& rule);

struct PolicyFile {
  std::string name;               // for messages and explain()
  std::vector<PolicyRule> rules;  // in the file's order

  /// The first rule that matches, or null. Points into this object.
  [[nodiscard]] KVONCE_API const PolicyRule* find(const Problem& problem, const Device& device) const noexcept;
};

/// Reads the text of a policy file (docs/tuning.md has the form). Throws Error{InvalidArgument} naming `name`, the line,
/// what was given and what is allowed.
KVONCE_API PolicyFile parse_policy_file(std::string_view text, std::string_view name);

/// Reads a policy file. Errors as parse_policy_file(), and when `path` cannot be read.
KVONCE_API PolicyFile load_policy_file(const std::string& path);

}  // namespace kvonce
