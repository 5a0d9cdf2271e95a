#include "plan_problems.hpp"

#include <algorithm>
#include <limits>
#include <sstream>

#include "core/plan_data.hpp"

namespace kvonce::fuzz {
namespace {

const std::vector<std::int64_t> kOdd = {std::numeric_limits<std::int64_t>::min(),
                                        -(1LL << 32),
                                        -2147483648LL,
                                        -64,
                                        -1,
                                        0,
                                        1,
                                        3,
                                        63,
                                        65,
                                        1023,
                                        1025,
                                        65535,
                                        (1LL << 20) - 1,
                                        1LL << 20,
                                        (1LL << 20) + 1,
                                        (1LL << 22),
                                        (1LL << 24),
                                        2147483646LL,
                                        2147483647LL,
                                        2147483648LL,
                                        1LL << 32,
                                        1LL << 40,
                                        1LL << 62,
                                        std::numeric_limits<std::int64_t>::max()};

Problem plausible(Choices& choices) {
  Problem p;
  p.num_seqs = choices.pick(std::vector<std::int64_t>{0, 1, 1, 2, 3, 5, 64, 1000, 1 << 20});
  p.num_kv_heads = choices.pick(std::vector<std::int64_t>{1, 1, 2, 3, 4, 8, 32, 1000, 1 << 20});
  const std::int64_t group =
      choices.between(1, 1) + (choices.below(4) == 0 ? choices.between(0, 127) : choices.between(0, 8));
  p.num_q_heads = p.num_kv_heads * group;
  p.head_dim_qk =
      choices.pick(std::vector<std::int64_t>{1, 7, 40, 64, 64, 96, 128, 128, 192, 256, 512, 576, 1000, 1024});
  p.head_dim_v = choices.below(3) == 0 ? choices.between(0, 1024) : p.head_dim_qk;
  p.q_len = choices.between(0, 64);
  p.max_kv_len = choices.pick(std::vector<std::int64_t>{0, 1, 100, 4096, 131072, 1LL << 22, 1LL << 24, 2147483647LL});
  p.q_dtype = static_cast<DType>(choices.below(3));
  p.out_dtype = static_cast<DType>(choices.below(3));
  p.k_format = static_cast<KvFormat>(choices.below(3));
  p.v_format = static_cast<KvFormat>(choices.below(3));
  p.causal = choices.below(2) == 0;
  if (choices.below(3) == 0) p.window = choices.between(0, 10000);
  if (choices.below(4) == 0) p.scale = static_cast<float>(choices.between(-100, 100)) / 64.0F;
  return p;
}

void spoil(Choices& choices, Problem& p) {
  std::int64_t* const numbers[] = {&p.num_seqs,   &p.q_len,      &p.num_q_heads, &p.num_kv_heads, &p.head_dim_qk,
                                   &p.head_dim_v, &p.max_kv_len, &p.quant_group, &p.page_size,    &p.window};
  const float floats[] = {0.0F,
                          -0.0F,
                          1.0F,
                          -1.0F,
                          30.0F,
                          1e-38F,
                          3e38F,
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()};
  switch (choices.below(16)) {
    case 0:
      p.q_dtype = static_cast<DType>(choices.below(256));
      break;
    case 1:
      p.out_dtype = static_cast<DType>(choices.below(256));
      break;
    case 2:
      p.k_format = static_cast<KvFormat>(choices.below(10));
      break;
    case 3:
      p.v_format = static_cast<KvFormat>(choices.below(10));
      break;
    case 4:
      p.layout = static_cast<KvLayout>(choices.below(5));
      break;
    case 5:
      p.mask = static_cast<MaskKind>(choices.below(6));
      break;
    case 6:
      p.scale = floats[choices.below(10)];
      break;
    case 7:
      p.softcap = floats[choices.below(10)];
      break;
    case 8:
      p.has_sinks = true;
      break;
    case 9:
      p.has_alibi = true;
      break;
    case 10:
      p.has_mask_slopes = true;
      break;
    case 11:
      p.has_segments = true;
      break;
    case 12:
      p.v_is_k_prefix = true;
      break;
    case 13:
      p.k_format = p.v_format = static_cast<KvFormat>(choices.below(8));
      p.quant_group = choices.pick(std::vector<std::int64_t>{0, 32, 64, 128});
      p.scales_dtype = static_cast<DType>(choices.below(4));
      break;
    case 14:
      p.layout = choices.below(2) == 0 ? KvLayout::paged_nhd : KvLayout::paged_hnd;
      p.page_size = choices.between(0, 300);
      break;
    default:
      *numbers[choices.below(10)] = choices.below(2) == 0 ? choices.pick(kOdd) : choices.any();
      break;
  }
}

PlanOptions random_options(Choices& choices, const Device& device) {
  PlanOptions options;
  if (choices.below(3) != 0) return options;
  std::int64_t* const numbers[] = {
      &options.chunk_tokens,          &options.policy.row_tile,    &options.policy.rows_per_worker,
      &options.policy.chunk_tokens,   &options.policy.step_tokens, &options.policy.prefetch_tokens,
      &options.policy.prefetch_lines, &options.policy.pair_dot,    &options.policy.worker_bytes,
      &options.policy.prefetch_level, &options.policy.splits,      &options.policy.cluster,
      &options.policy.join_blocks,    &options.policy.body,        &options.policy.simdgroups};
  // CUDA refuses most fields of the CPU's kernels, so its options are mostly of its own.
  if (device.backend == Backend::cuda && choices.below(4) != 0) {
    options.policy.row_tile = choices.pick(std::vector<std::int64_t>{0, 8, 16});
    options.policy.splits = choices.pick(std::vector<std::int64_t>{0, 1, 2, 13, 132, 65535});
    options.policy.cluster = choices.between(-1, 1);
    options.policy.join_blocks = choices.pick(std::vector<std::int64_t>{0, 1, 3, 16, 1024});
    if (choices.below(3) == 0) options.chunk_tokens = 16 * choices.between(1, 1 << 16);
    return options;
  }
  if (device.backend == Backend::metal && choices.below(4) != 0) {
    options.policy.body = choices.between(0, 3);
    if (choices.below(4) == 0) options.policy.row_tile = choices.pick(std::vector<std::int64_t>{1, 2, 4, 8, 16});
    options.policy.splits = choices.pick(std::vector<std::int64_t>{0, 0, 1, 30, 65535});
    if (choices.below(4) == 0) options.policy.simdgroups = choices.pick(std::vector<std::int64_t>{1, 2, 4, 8, 16});
    if (choices.below(3) == 0) options.chunk_tokens = choices.between(1, 1 << 20);
    return options;
  }
  for (std::int64_t* number : numbers) {
    if (choices.below(4) == 0) *number = choices.pick(std::vector<std::int64_t>{1, 2, 4, 8, 16, 32, 64, 128, 4096});
    if (choices.below(24) == 0) *number = choices.pick(kOdd);
  }
  options.earlier_kv_ready = choices.below(16) == 0;
  return options;
}

Device random_device(Choices& choices, const std::vector<Device>& known) {
  Device device = choices.pick(known);
  while (!device.unavailable.empty() && choices.below(10) != 0) device = choices.pick(known);
  device.num_threads = static_cast<int>(choices.pick(std::vector<std::int64_t>{1, 1, 2, 3, 7, 64, 1024}));
  if (choices.below(20) == 0) device.num_threads = static_cast<int>(choices.pick(kOdd) & 0xffffffffLL);
  if (choices.below(20) == 0) device.l1_bytes = device.l2_bytes = device.l3_bytes = choices.pick(kOdd);
  if (device.backend == Backend::cuda && choices.below(4) == 0) {
    device.num_sms = static_cast<int>(choices.pick(std::vector<std::int64_t>{-1, 0, 1, 2, 7, 108, 192, 2147483647}));
  }
  if (device.backend == Backend::metal && choices.below(2) == 0) {
    device.num_sms = static_cast<int>(choices.pick(std::vector<std::int64_t>{0, 1, 8, 20, 80, 2147483647}));
    device.max_threadgroup_threads = choices.pick(std::vector<std::int64_t>{0, 32, 100, 384, 832, 1024, 1LL << 40});
    device.threadgroup_bytes = choices.pick(std::vector<std::int64_t>{0, 16384, 20000, 32768, 1LL << 62});
    std::int64_t* const limits[] = {&device.max_threadgroup_threads, &device.threadgroup_bytes};
    if (choices.below(10) == 0) *limits[choices.below(2)] = choices.pick(kOdd);
  }
  if (choices.below(40) == 0) device.target = "nonsense";
  if (choices.below(40) == 0) device.read_gbps = choices.below(2) == 0 ? -1.0 : 1e300;
  return device;
}

// Empty, or what is wrong with the plan.
std::string judge(const Plan& plan) {
  const Problem& p = plan.problem();
  constexpr std::size_t kLargest = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max());
  if (plan.workspace_bytes() > kLargest) return "workspace_bytes beyond 63 bits";
  if (plan.kernel_id().rfind("attend_", 0) != 0) return "kernel_id '" + std::string(plan.kernel_id()) + "'";
  if (plan.read_factor() < 1) return "read_factor " + std::to_string(plan.read_factor());
  const std::int64_t least = p.max_kv_len > 0 && p.num_seqs > 0 && p.q_len > 0 ? 1 : 0;
  const bool on_cuda = plan.device().backend == Backend::cuda;
  const bool on_metal = plan.device().backend == Backend::metal;
  const std::int64_t most = std::max(p.max_kv_len + 1, on_cuda || on_metal ? plan.policy().splits : 0);
  if (plan.max_chunks() < least || plan.max_chunks() > most) {
    return "max_chunks " + std::to_string(plan.max_chunks());
  }
  if (plan.max_kv_bytes() < 0) return "max_kv_bytes " + std::to_string(plan.max_kv_bytes());
  const Policy& policy = plan.policy();
  if (policy.row_tile < 1) return "policy.row_tile " + std::to_string(policy.row_tile);
  if (policy.rows_per_worker < 1) return "policy.rows_per_worker " + std::to_string(policy.rows_per_worker);
  if (policy.chunk_tokens < 1) return "policy.chunk_tokens " + std::to_string(policy.chunk_tokens);
  if (policy.step_tokens < 1) return "policy.step_tokens " + std::to_string(policy.step_tokens);
  if (on_cuda) {
    if (policy.splits < 1) return "policy.splits " + std::to_string(policy.splits);
    if (policy.cluster < 0) return "policy.cluster " + std::to_string(policy.cluster);
    if (policy.join_blocks < 1) return "policy.join_blocks " + std::to_string(policy.join_blocks);
    return plan.explain().empty() ? "explain() is empty" : "";
  }
  if (on_metal) {
    const Device& gpu = plan.device();
    const std::int64_t most_threads = gpu.max_threadgroup_threads > 0 ? gpu.max_threadgroup_threads : 256;
    if (policy.splits < 1) return "policy.splits " + std::to_string(policy.splits);
    if (policy.body < 1 || policy.body > 3) return "policy.body " + std::to_string(policy.body);
    if (policy.simdgroups < 1 || policy.simdgroups * 32 > most_threads) {
      return "policy.simdgroups " + std::to_string(policy.simdgroups);
    }
    return plan.explain().find("prediction") == std::string::npos ? "explain() without a prediction" : "";
  }
  if (policy.prefetch_tokens < 0) return "policy.prefetch_tokens " + std::to_string(policy.prefetch_tokens);
  if (policy.prefetch_lines < 1) return "policy.prefetch_lines " + std::to_string(policy.prefetch_lines);
  if (policy.prefetch_level < 1) return "policy.prefetch_level " + std::to_string(policy.prefetch_level);
  if (policy.heads_per_step < 1) return "policy.heads_per_step " + std::to_string(policy.heads_per_step);
  const core::WorkspaceLayout& layout = plan.data().workspace;
  for (const std::size_t offset : {layout.item_starts, layout.runs, layout.counters, layout.partial_lse,
                                   layout.partial_o, layout.scratch, layout.scratch_bytes}) {
    if (offset > layout.total_bytes) return "a part of the workspace begins after its end";
  }
  if (!p.scale.has_value() || p.head_dim_v < 1) return "the problem was not resolved";
  if (plan.explain().empty()) return "explain() is empty";
  return {};
}

}  // namespace

std::uint64_t ByteChoices::take(int num_bytes) {
  std::uint64_t number = 0;
  for (int i = 0; i < num_bytes && !bytes_.empty(); ++i) {
    number |= static_cast<std::uint64_t>(bytes_.front()) << (8 * i);
    bytes_ = bytes_.subspan(1);
  }
  return number;
}

std::int64_t ByteChoices::below(std::int64_t count) {
  int num_bytes = 1;
  while (num_bytes < 8 && (count - 1) >> (8 * num_bytes) != 0) ++num_bytes;
  return static_cast<std::int64_t>(take(num_bytes) % static_cast<std::uint64_t>(count));
}

std::string Trial::describe() const {
  const Problem& p = problem;
  std::ostringstream text;
  text << "num_seqs=" << p.num_seqs << " q_len=" << p.q_len << " heads=" << p.num_q_heads << '/' << p.num_kv_heads
       << " dims=" << p.head_dim_qk << 'x' << p.head_dim_v << " max_kv_len=" << p.max_kv_len
       << " q_dtype=" << static_cast<int>(p.q_dtype) << " out_dtype=" << static_cast<int>(p.out_dtype)
       << " formats=" << static_cast<int>(p.k_format) << '/' << static_cast<int>(p.v_format)
       << " quant_group=" << p.quant_group << " scales_dtype=" << static_cast<int>(p.scales_dtype)
       << " layout=" << static_cast<int>(p.layout) << " page_size=" << p.page_size << " window=" << p.window
       << " mask=" << static_cast<int>(p.mask) << " softcap=" << p.softcap << " target=" << device.target
       << " sms=" << device.num_sms << " threads=" << device.num_threads << " threadgroup=" << device.threadgroup_bytes
       << '/' << device.max_threadgroup_threads << " l1_bytes=" << device.l1_bytes
       << " chunk_tokens=" << options.chunk_tokens << " policy=" << to_string(options.policy);
  return text.str();
}

std::vector<Device> known_devices() {
  std::vector<Device> known = devices();
  for (const char* target : {"sm_80", "sm_90", "sm_120"}) {
    Device device;
    device.backend = Backend::cuda;
    device.target = target;
    device.num_sms = 132;
    known.push_back(device);
  }
  for (const char* target : {"apple7", "apple9", "apple10"}) known.push_back(metal_device(target, 20));
  return known;
}

Trial try_plan(Choices& choices, const std::vector<Device>& known) {
  Trial trial;
  trial.problem = plausible(choices);
  for (std::int64_t spoils = choices.below(4); spoils > 1; --spoils) spoil(choices, trial.problem);
  trial.device = random_device(choices, known);
  if (trial.device.backend == Backend::metal && choices.below(4) != 0) {  // which takes one type for all three
    trial.problem.head_dim_qk = std::min<std::int64_t>(trial.problem.head_dim_qk, 512);
    trial.problem.head_dim_v = std::min<std::int64_t>(trial.problem.head_dim_v, 512);
    trial.problem.k_format = trial.problem.v_format = static_cast<KvFormat>(choices.below(3));
    trial.problem.q_dtype = static_cast<DType>(trial.problem.k_format);
    if (choices.below(4) == 0) {  // or one of MLX's formats for K and V
      trial.problem.k_format = trial.problem.v_format = choices.below(2) == 0 ? KvFormat::mlx_int8 : KvFormat::mlx_int4;
      trial.problem.quant_group = 64;
      trial.problem.scales_dtype = trial.problem.q_dtype;
      trial.problem.head_dim_qk = choices.pick(std::vector<std::int64_t>{64, 128, 192, 256, 512});
      trial.problem.head_dim_v = 0;
    }
  }
  trial.options = random_options(choices, trial.device);
  try {
    trial.fault = judge(make_plan(trial.problem, trial.device, trial.options));
  } catch (const Error& error) {
    trial.refusal = static_cast<unsigned>(error.code());
    if (trial.refusal < 1 || trial.refusal > 3) {
      trial.fault = "error code " + std::to_string(trial.refusal) + ": " + error.what();
    } else if (std::string(error.what()).size() < 10) {
      trial.fault = "an error without a message";
    }
  } catch (const std::exception& error) {
    trial.fault = std::string("an exception that is no Error: ") + error.what();
  }
  return trial;
}

}  // namespace kvonce::fuzz
