// What the bodies' loads ask for, by the GPU's counters. Three quantities per body, each over the bytes of K and V:
//   requested   bytes that the threads' loads from global memory name: the read factor itself, plus q and parameters
//   l2_to_sm    what crosses from the L2 into the multiprocessors; an L1 that warps share hides part of a read factor
//   dram        what leaves DRAM, with an L2 that holds nothing of K and V before
// Without CUPTI (KVONCE_METAL_CUPTI) the kernels run for an outside profiler, and the counters are absent.
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "cuda_kernels.hpp"
#include "generator.hpp"
#include "on_cuda.hpp"
#include "shared/numeric.h"

#if defined(KVONCE_METAL_CUPTI)
#include "counters/cupti_profiler.hpp"
#endif

namespace kvonce::emulation {
namespace {

struct Geometry {
  const char* name;
  std::int64_t q_heads, kv_heads, dim;
};
constexpr Geometry kGeometries[] = {{"32q/32kv d128", 32, 32, 128},
                                    {"32q/8kv d128", 32, 8, 128},
                                    {"32q/4kv d128", 32, 4, 128},
                                    {"16q/2kv d128", 16, 2, 128},
                                    {"64q/8kv d64", 64, 8, 64}};
constexpr std::size_t kFlushBytes = std::size_t{256} << 20;

#if defined(KVONCE_METAL_CUPTI)
struct Quantity {
  const char* name;  // in the JSON line, over the bytes of K and V
  const char* metric;
};
constexpr Quantity kQuantities[] = {{"requested_per_kv_byte", "smsp__sass_data_bytes_mem_global_op_ld.sum"},
                                    {"l2_to_sm_per_kv_byte", "l1tex__m_xbar2l1tex_read_bytes_mem_lg_op_ld.sum"},
                                    {"dram_per_kv_byte", "dram__bytes_read.sum"}};

// Those of the quantities that the chip counts.
class Counters {
 public:
  Counters() : device_(0), metrics_(device_.chip(), device_.availability()) {
    std::vector<std::string> metrics;
    for (const Quantity& quantity : kQuantities) {
      if (!metrics_.find(quantity.metric)) continue;
      metrics.emplace_back(quantity.metric);
      names_.emplace_back(quantity.name);
    }
    metrics_.select(metrics);
  }
  [[nodiscard]] const std::vector<std::string>& names() const { return names_; }
  [[nodiscard]] std::vector<double> count(const std::function<void()>& before,
                                          const std::function<void()>& call) const {
    return metrics_.count(device_, before, [&] {
      call();
      require_success(cudaDeviceSynchronize(), "running the kernels");
    });
  }

 private:
  tool::CuptiDevice device_;
  tool::Metrics metrics_;
  std::vector<std::string> names_;
};
#endif

std::vector<std::uint16_t> random_halves(std::int64_t count, std::uint64_t seed) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = shared::f32_to_f16(static_cast<float>(conformance::normal_value(seed, i)));
  }
  return values;
}

// What is counted does not depend on the number of simdgroups.
Choice choice_of(Body body, std::int64_t group) {
  Choice choice;
  choice.body = body;
  choice.num_chunks = 8;  // long ones, so that what a thread loads once matters little
  if (body == Body::per_head) {
    choice.row_tile = 1;
    choice.row_tiles = group;
  } else {
    choice.row_tile = body == Body::matrix || group > 4 ? 8 : group > 2 ? 4 : 1;
    choice.token_parts = 4;
  }
  return choice;
}

double relative_difference(const std::vector<std::uint16_t>& a, const std::vector<std::uint16_t>& b) {
  double difference = 0.0;
  double size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double x = shared::f16_to_f32(a[i]);
    const double y = shared::f16_to_f32(b[i]);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  return std::sqrt(difference / size);
}

}  // namespace

int count_bytes(std::int64_t kv_len) {
  int wrong = 0;
  const DeviceMemory flush(kFlushBytes);  // before the counters, which need the context that it makes
#if defined(KVONCE_METAL_CUPTI)
  const Counters counters;
#endif
  for (const Geometry& g : kGeometries) {
    Problem p;
    p.num_q_heads = g.q_heads;
    p.num_kv_heads = g.kv_heads;
    p.head_dim_qk = p.head_dim_v = g.dim;
    p.max_kv_len = kv_len;
    p.q_dtype = p.out_dtype = DType::f16;
    p.k_format = p.v_format = KvFormat::f16;
    const std::int64_t elements = g.kv_heads * kv_len * g.dim;
    const auto q_host = random_halves(g.q_heads * g.dim, 1);
    const auto k_host = random_halves(elements, 2);
    const auto v_host = random_halves(elements, 3);
    const DeviceMemory q(q_host.data(), q_host.size() * 2);
    const DeviceMemory k(k_host.data(), k_host.size() * 2);
    const DeviceMemory v(v_host.data(), v_host.size() * 2);
    Inputs inputs;
    inputs.q = {q.as<void>(), g.q_heads * g.dim, g.dim, g.dim};
    inputs.k = {k.as<void>(), elements, kv_len * g.dim, g.dim};
    inputs.v = {v.as<void>(), elements, kv_len * g.dim, g.dim};
    std::vector<std::uint16_t> baseline;
    for (const Body body : {Body::per_head, Body::vector, Body::matrix}) {
      const Launch launch = make_launch(p, inputs, choice_of(body, g.q_heads / g.kv_heads));
      const DeviceMemory params(launch.params.data(), sizeof launch.params);
      const DeviceMemory scalars(launch.scalars.data(), sizeof launch.scalars);
      const DeviceMemory strides(launch.strides.data(), sizeof launch.strides);
      const auto num_partials = static_cast<std::size_t>(launch.num_rows * launch.num_chunks());
      const DeviceMemory partial_o(num_partials * static_cast<std::size_t>(g.dim) * 4);
      const DeviceMemory partial_sums(num_partials * 8);
      const DeviceMemory out(static_cast<std::size_t>(launch.num_rows * g.dim) * 2);
      const DeviceMemory lse(static_cast<std::size_t>(launch.num_rows) * 4);
      const auto* at = strides.as<std::int64_t>();
      const AttendArgs args{q.as<void>(),
                            k.as<void>(),
                            v.as<void>(),
                            nullptr,
                            nullptr,
                            nullptr,
                            nullptr,
                            params.as<std::int64_t>(),
                            scalars.as<float>(),
                            at,
                            at + 4,
                            at + 8,
                            at + 12,
                            partial_o.as<float>(),
                            partial_sums.as<float>()};
      const auto attend = [&] { enqueue_attend(launch, args); };
      attend();
      enqueue_merge(launch, {partial_o.as<float>(), partial_sums.as<float>(), nullptr, params.as<std::int64_t>(),
                             out.as<void>(), lse.as<float>()});
      require_success(cudaDeviceSynchronize(), "running the kernels");
      std::vector<std::uint16_t> result(static_cast<std::size_t>(launch.num_rows * g.dim));
      out.copy_out(result.data());
      if (body == Body::per_head) baseline = result;
      const double difference = relative_difference(result, baseline);
      const double kv_bytes = 2.0 * 2.0 * static_cast<double>(elements);
      nlohmann::ordered_json line = {{"geometry", g.name},
                                     {"kv_len", kv_len},
                                     {"instance", launch.instance.name()},
                                     {"kv_bytes", kv_bytes},
                                     {"read_factor", launch.read_factor},
                                     {"rel_difference_to_per_head", difference}};
      bool holds = difference < 2e-3;
#if defined(KVONCE_METAL_CUPTI)
      const auto empty_l2 = [&flush] {
        require_success(cudaMemset(flush.as<void>(), 0, flush.bytes()), "emptying the L2");
        require_success(cudaDeviceSynchronize(), "emptying the L2");
      };
      const std::vector<double> counted = counters.count(empty_l2, attend);
      for (std::size_t i = 0; i < counted.size(); ++i) {
        line[counters.names()[i]] = counted[i] / kv_bytes;
        if (counters.names()[i] != "requested_per_kv_byte") continue;
        // q, parameters and strides are what may be more.
        const double excess = counted[i] / kv_bytes / static_cast<double>(launch.read_factor);
        holds = holds && excess >= 1.0 && excess < 1.25;
      }
#endif
      line["holds"] = holds;
      wrong += holds ? 0 : 1;
      std::puts(line.dump().c_str());
      std::fflush(stdout);
    }
  }
  return wrong;
}

}  // namespace kvonce::emulation
