// Inputs whose answer is exact by construction. They see structural faults (a missed or doubled key, a wrong head, a
// leaked mask) that a tolerance on random data hides.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "conformance.hpp"
#include "generator.hpp"
#include "run_case.hpp"
#include "shared/token_range.h"

namespace kvonce::conformance {
namespace {

struct Heads {
  std::int64_t q, kv;
};

class ExactSuite {
 public:
  ExactSuite(const Device& device, Level level, const OnResult& on_result)
      : device_(device), level_(level), on_result_(on_result) {}

  std::vector<CaseResult> run() {
    uniform_ones();
    uniform_counts();
    uniform_means();
    shifted_counts();
    needles();
    head_constants();
    feature_pairs();
    future_keys();
    window_counts();
    padded_counts();
    masked_counts();
    capped_leaks();
    powers_of_two();
    return std::move(results_);
  }

 private:
  static ValueFn constant(double value) {
    return [value](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return value; };
  }

  [[nodiscard]] bool quick() const { return level_ == Level::quick; }

  // Two sequences of different lengths, more KV heads than one, neither equal to the group.
  static CaseSpec base(Heads heads, std::int64_t dim, std::int64_t kv_len, std::int64_t q_len, KvFormat format,
                       DType out_dtype) {
    CaseSpec spec;
    Problem& p = spec.problem;
    p.num_seqs = 2;
    p.num_q_heads = heads.q;
    p.num_kv_heads = heads.kv;
    p.head_dim_qk = dim;
    p.head_dim_v = dim;
    p.q_len = q_len;
    p.max_kv_len = kv_len + 3;
    p.k_format = format;
    p.v_format = format;
    p.q_dtype = static_cast<DType>(format);
    p.out_dtype = out_dtype;
    spec.kv_lens = {static_cast<std::int32_t>(kv_len), static_cast<std::int32_t>(kv_len / 2)};
    spec.num_threads = 2;
    spec.seed = static_cast<std::uint64_t>(kv_len * 31 + dim);
    return spec;
  }

  void add(const char* id, const CaseSpec& spec, const ExpectedFn& expected, Weights weights = Weights::zero_or_one) {
    const Problem& p = spec.problem;
    CaseSpec named = spec;
    named.name = device_.target + " " + id + " " + std::to_string(p.num_q_heads) + "q/" +
                 std::to_string(p.num_kv_heads) + "kv d" + std::to_string(p.head_dim_qk) +
                 " kv=" + std::to_string(spec.kv_lens.front()) + " q=" + std::to_string(p.q_len) + " " +
                 std::string(to_string(p.k_format)) + " out=" + std::string(to_string(p.out_dtype)) +
                 " chunk=" + std::to_string(spec.options.chunk_tokens);
    if (!is_wanted(named.name)) return;
    results_.push_back(check_exact(named, device_, expected, weights));
    if (on_result_) on_result_(results_.back());
  }

  static shared::TokenRange visible(const CaseSpec& spec, std::int64_t seq, std::int64_t row) {
    const Problem& p = spec.problem;
    const std::int64_t kv_start = spec.kv_starts.empty() ? 0 : spec.kv_starts[static_cast<std::size_t>(seq)];
    return shared::visible_range(row, p.q_len, spec.kv_lens[static_cast<std::size_t>(seq)], kv_start, p.causal,
                                 p.window);
  }

  [[nodiscard]] std::vector<std::int64_t> lengths() const {
    if (quick()) return {1, 7, 65, 257};
    return {1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4097};
  }

  static constexpr KvFormat kPlain[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16};

  // V1a: all weights equal, V = 1.
  void uniform_ones() {
    for (const KvFormat format : kPlain) {
      for (const std::int64_t kv_len : lengths()) {
        CaseSpec spec = base({6, 2}, 64, kv_len, 2, format, static_cast<DType>(format));
        spec.q_value = constant(0.0);
        spec.v_value = constant(1.0);
        add("V1a", spec, [&spec](std::int64_t seq, std::int64_t, std::int64_t row, std::int64_t) {
          const auto range = visible(spec, seq, row);
          return range.end > range.begin ? 1.0 : 0.0;
        });
      }
    }
  }

  // V1b: feature d probes key d + first: V is 2^k there and 0 elsewhere, so out = 2^k / n if the row sees that key.
  void probe_counts(const char* id, CaseSpec spec) {
    const std::int64_t kv_len = *std::max_element(spec.kv_lens.begin(), spec.kv_lens.end());
    const double power = std::exp2(std::ceil(std::log2(static_cast<double>(std::max<std::int64_t>(kv_len, 1)))));
    const std::int64_t dim = spec.problem.dim_v();
    const std::int64_t step = quick() && kv_len > 2 * dim ? kv_len - dim : dim;
    for (std::int64_t first = 0; first < kv_len; first += step) {
      spec.v_value = [first, power](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
        return token == first + d ? power : 0.0;
      };
      add(id, spec, [&](std::int64_t seq, std::int64_t, std::int64_t row, std::int64_t d) {
        const auto range = visible(spec, seq, row);
        const std::int64_t token = first + d;
        if (token < range.begin || token >= range.end) return 0.0;
        return power / static_cast<double>(range.end - range.begin);
      });
    }
  }

  void uniform_counts() {
    for (const KvFormat format : kPlain) {
      for (const std::int64_t kv_len : lengths()) {
        if (kv_len > 1100 && format != KvFormat::f16) continue;
        CaseSpec spec = base({6, 3}, kv_len > 1100 ? 512 : 128, kv_len, 3, format, static_cast<DType>(format));
        spec.q_value = constant(0.0);
        probe_counts("V1b", spec);
        if (kv_len > 300) continue;
        spec.options.chunk_tokens = 5;
        probe_counts("V1b", spec);
        spec.problem.causal = false;
        probe_counts("V1b", spec);
      }
    }
  }

  // V1c: V = token index, out = the mean of the visible indices.
  void uniform_means() {
    for (const std::int64_t group : {1, 3, 5, 6, 7, 12}) {
      for (std::int64_t q_len = 1; q_len <= 8; ++q_len) {
        if (quick() && q_len % 3 != 2) continue;
        for (const std::int64_t kv_len : {4, 6, 129}) {
          CaseSpec spec = base({2 * group, 2}, 80, kv_len, q_len, KvFormat::f32, DType::f32);
          spec.q_value = constant(0.0);
          spec.v_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t) {
            return static_cast<double>(token);
          };
          add("V1c", spec, [&spec](std::int64_t seq, std::int64_t, std::int64_t row, std::int64_t) {
            const auto range = visible(spec, seq, row);
            return range.end > range.begin ? static_cast<double>(range.begin + range.end - 1) / 2.0 : 0.0;
          });
        }
      }
    }
  }

  // V9: every logit shifted by the same large amount through feature 0.
  void shifted_counts() {
    for (const double shift : {-30000.0, -104.0, 88.0, 30000.0}) {
      for (const KvFormat format : kPlain) {
        CaseSpec spec = base({8, 2}, 64, 100, 2, format, static_cast<DType>(format));
        spec.problem.scale = 1.0F;
        spec.q_value = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t d) { return d == 0 ? 1.0 : 0.0; };
        spec.k_value = [shift](std::int64_t, std::int64_t, std::int64_t, std::int64_t d) {
          return d == 0 ? shift : 0.0;
        };
        probe_counts("V9", spec);
      }
    }
  }

  // V2: one key takes all the weight, so out is its V.
  void needles() {
    std::vector<std::int64_t> places = {0, 1, 31, 32, 63, 64, 127, 128, 255, 256, 298, 299};
    if (quick()) places = {0, 64, 299};
    for (const KvFormat format : kPlain) {
      for (const std::int64_t place : places) {
        for (const std::int64_t dim : {64, 112, 40}) {
          CaseSpec spec = base({12, 4}, dim, 300, 1, format, static_cast<DType>(format));
          spec.kv_lens = {300, 300};
          const std::uint64_t q_seed = spec.seed + 1000;
          spec.q_value = [q_seed, dim](std::int64_t, std::int64_t head, std::int64_t, std::int64_t d) {
            return normal_value(q_seed, static_cast<std::uint64_t>(head / 3 * dim + d));
          };
          spec.k_value = [q_seed, dim, place](std::int64_t, std::int64_t head, std::int64_t token, std::int64_t d) {
            return token == place ? 100.0 * normal_value(q_seed, static_cast<std::uint64_t>(head * dim + d)) : 0.0;
          };
          spec.v_value = [](std::int64_t seq, std::int64_t head, std::int64_t token, std::int64_t d) {
            return static_cast<double>((token * 7 + head * 3 + seq + d) % 256);
          };
          add("V2", spec, [&spec, place](std::int64_t seq, std::int64_t head, std::int64_t, std::int64_t d) {
            return spec.v_value(seq, head / 3, place, d);
          });
        }
      }
    }
  }

  // V3: V is one constant per (sequence, KV head), whatever q and K are. Exact but where a kernel rounds probabilities.
  void head_constants() {
    const std::vector<Heads> geometries = {{32, 4}, {32, 16}, {6, 3},  {12, 4}, {12, 12}, {32, 32},
                                           {32, 8}, {28, 4},  {71, 1}, {8, 1},  {8, 4},   {16, 2},
                                           {24, 3}, {40, 8},  {14, 7}, {30, 5}, {18, 6}};
    for (const Heads heads : geometries) {
      for (const std::int64_t q_len : {1, 4}) {
        for (const KvFormat format : kPlain) {
          if (quick() && (q_len == 4) != (format == KvFormat::bf16)) continue;
          CaseSpec spec = base(heads, 96, 70, q_len, format, static_cast<DType>(format));
          spec.problem.num_seqs = 3;
          spec.kv_lens = {70, 9, 33};
          spec.num_threads = 3;
          spec.options.chunk_tokens = q_len == 4 ? 32 : 0;
          spec.v_value = [](std::int64_t seq, std::int64_t head, std::int64_t, std::int64_t) {
            return static_cast<double>(seq * 32 + head + 1);
          };
          const std::int64_t group = heads.q / heads.kv;
          add(
              "V3", spec,
              [group](std::int64_t seq, std::int64_t head, std::int64_t, std::int64_t) {
                const std::int64_t kv_head = head / group;
                return static_cast<double>(seq * 32 + kv_head + 1);
              },
              Weights::any);
        }
      }
    }
  }

  // q = e_i for head i of a group, K of token t = c * e_t: head i's only large score is token i's. A kernel that pairs
  // feature x of q with feature y of K sends the needle elsewhere.
  void feature_pairs() {
    for (const KvFormat format : kPlain) {
      for (const std::int64_t dim : {8, 64, 72, 128}) {
        CaseSpec spec = base({dim, 1}, dim, dim, 1, format, static_cast<DType>(format));
        spec.problem.num_seqs = 1;
        spec.kv_lens = {static_cast<std::int32_t>(dim)};
        spec.problem.scale = 1.0F;
        spec.q_value = [](std::int64_t, std::int64_t head, std::int64_t, std::int64_t d) {
          return head == d ? 32.0 : 0.0;
        };
        spec.k_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
          return token == d ? 32.0 : 0.0;
        };
        spec.v_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
          return static_cast<double>(token + (d % 2) * 64);
        };
        add("B35", spec, [](std::int64_t, std::int64_t head, std::int64_t, std::int64_t d) {
          return static_cast<double>(head + (d % 2) * 64);
        });
      }
    }
  }

  // The newest keys have huge logits and V = 200: only the rows at or after them may see them, and those see the newest
  // visible one alone.
  void future_keys() {
    for (std::int64_t q_len = 2; q_len <= 8; ++q_len) {
      for (const KvFormat format : kPlain) {
        for (const std::int64_t chunk : {0, 3}) {
          CaseSpec spec = base({14, 2}, 64, 67, q_len, format, static_cast<DType>(format));
          spec.options.chunk_tokens = chunk;
          spec.problem.scale = 1.0F;
          spec.q_value = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t d) { return d == 0 ? 1.0 : 0.0; };
          spec.k_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
            return d == 0 ? 256.0 * static_cast<double>(token) : 0.0;
          };
          spec.v_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t) {
            return static_cast<double>(token);
          };
          add("B85", spec, [&spec](std::int64_t seq, std::int64_t, std::int64_t row, std::int64_t) {
            const auto range = visible(spec, seq, row);
            return range.end > range.begin ? static_cast<double>(range.end - 1) : 0.0;
          });
        }
      }
    }
  }

  // B89: which keys a window shows, key by key.
  void window_counts() {
    for (const std::int64_t window : {1, 2, 127, 128, 129, 255, 256, 257}) {
      for (const std::int64_t q_len : {1, 3, 8}) {
        if (quick() && q_len != 3) continue;
        CaseSpec spec = base({6, 2}, 128, 256, q_len, KvFormat::f16, DType::f16);
        spec.problem.window = window;
        spec.q_value = constant(0.0);
        probe_counts("B89", spec);
        spec.options.chunk_tokens = 48;
        probe_counts("B89", spec);
      }
    }
  }

  // Left padding: keys before kv_start are not seen.
  void padded_counts() {
    for (const std::int32_t start : {1, 5, 31, 99, 100}) {
      CaseSpec spec = base({6, 2}, 128, 100, 2, KvFormat::bf16, DType::bf16);
      spec.kv_starts = {start, static_cast<std::int32_t>(start / 2)};
      spec.q_value = constant(0.0);
      probe_counts("kv_starts", spec);
    }
  }

  // Which keys a mask shows, key by key: boolean, additive and, over the newest keys, tree masks.
  void masked_counts() {
    for (const MaskKind mask : {MaskKind::boolean, MaskKind::additive, MaskKind::tree}) {
      for (const std::int64_t q_len : {1, 3, 8}) {
        for (const std::int64_t chunk : {0, 48}) {
          if (quick() && q_len != 3) continue;
          CaseSpec spec = base({6, 2}, 128, 256, q_len, KvFormat::f16, DType::f16);
          spec.kv_lens = {256, 200};
          spec.options.chunk_tokens = chunk;
          spec.problem.mask = mask;
          if (mask == MaskKind::additive) spec.problem.mask_dtype = DType::f16;
          spec.q_value = constant(0.0);
          const auto shows = [mask, q_len](std::int64_t seq, std::int64_t head, std::int64_t row, std::int64_t token) {
            if (mask == MaskKind::tree) return (row + token * 3) % q_len < 2;
            return (token < 30 || token >= 160) && (token * 3 + row + head + seq) % 4 != 0;
          };
          spec.mask_value = [mask, shows](std::int64_t seq, std::int64_t head, std::int64_t row, std::int64_t token) {
            const bool shown = shows(seq, head, row, token);
            if (mask == MaskKind::additive) return shown ? 0.0 : -std::numeric_limits<double>::infinity();
            return shown ? 1.0 : 0.0;
          };
          const auto sees = [&spec, mask, shows](std::int64_t seq, std::int64_t head, std::int64_t row,
                                                 std::int64_t token) {
            const std::int64_t first = spec.kv_lens[static_cast<std::size_t>(seq)] - spec.problem.q_len;
            if (mask == MaskKind::tree) return token < first || shows(seq, 0, row, token - first);
            return shows(seq, head, row, token);
          };
          for (std::int64_t first = 0; first < 256; first += 128) {
            spec.v_value = [first](std::int64_t, std::int64_t, std::int64_t token, std::int64_t d) {
              return token == first + d ? 256.0 : 0.0;
            };
            add("masks", spec, [&](std::int64_t seq, std::int64_t head, std::int64_t row, std::int64_t d) {
              const auto range = visible(spec, seq, row);
              const std::int64_t probed = first + d;
              std::int64_t count = 0;
              for (std::int64_t token = range.begin; token < range.end; ++token) {
                count += sees(seq, head, row, token) ? 1 : 0;
              }
              const bool seen = probed >= range.begin && probed < range.end && sees(seq, head, row, probed);
              return seen ? 256.0 / static_cast<double>(count) : 0.0;
            });
          }
        }
      }
    }
  }

  // B90: with a softcap of 1 and half of the keys masked, a masked V of 1000 must not leak; all seen V are 1.
  void capped_leaks() {
    for (const KvFormat format : kPlain) {
      for (const std::int64_t q_len : {1, 4}) {
        CaseSpec spec = base({14, 2}, 64, 130, q_len, format, static_cast<DType>(format));
        spec.problem.softcap = 1.0F;
        spec.problem.mask = MaskKind::boolean;
        spec.mask_value = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t token) {
          return token % 2 == 0 ? 1.0 : 0.0;
        };
        spec.v_value = [](std::int64_t, std::int64_t, std::int64_t token, std::int64_t) {
          return token % 2 == 0 ? 1.0 : 1000.0;
        };
        add(
            "B90", spec, [](std::int64_t, std::int64_t, std::int64_t, std::int64_t) { return 1.0; }, Weights::any);
      }
    }
  }

  // V10: 4 * V gives exactly 4 * out.
  void powers_of_two() {
    for (const KvFormat format : kPlain) {
      CaseSpec spec = base({10, 2}, 80, 150, 2, format, DType::f32);
      CaseResult result;
      result.name = device_.target + " V10 " + std::string(to_string(format));
      if (!is_wanted(result.name)) continue;
      spec.name = result.name;
      result.status = CaseResult::failed;
      try {
        const Plan plan = plan_case(spec, device_);
        result.kernel_id = std::string(plan.kernel_id());
        spec.v_value = small_values(1.0);
        CaseTensors once(spec);
        result.detail = run_case(plan, spec, once);
        CaseSpec scaled = spec;
        scaled.v_value = small_values(4.0);
        CaseTensors four(scaled);
        if (result.detail.empty()) result.detail = run_case(plan, scaled, four);
        if (result.detail.empty()) {
          result.detail =
              judge_exact(scaled, four, [&](std::int64_t s, std::int64_t h, std::int64_t r, std::int64_t d) {
                return 4.0 * once.out_value(s, h, r, d);
              });
        }
        if (result.detail.empty()) result.status = CaseResult::passed;
      } catch (const Error& error) {
        result.detail = std::string("refused: ") + error.what();
      }
      results_.push_back(result);
      if (on_result_) on_result_(result);
    }
  }

  static ValueFn small_values(double factor) {
    return [factor](std::int64_t seq, std::int64_t head, std::int64_t token, std::int64_t d) {
      return factor * static_cast<double>((seq * 5 + head * 3 + token * 7 + d * 11) % 63 - 31);
    };
  }

  const Device& device_;
  Level level_;
  const OnResult& on_result_;
  std::vector<CaseResult> results_;
};

}  // namespace

std::vector<CaseResult> run_exact(const Device& device, Level level, const OnResult& on_result) {
  return ExactSuite(device, level, on_result).run();
}

}  // namespace kvonce::conformance
