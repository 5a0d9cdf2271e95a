#include "plans.hpp"

#include <utility>

namespace kvonce::python {
namespace {

constexpr std::pair<std::string_view, DType> kDtypes[] = {
    {"float32", DType::f32}, {"float16", DType::f16}, {"bfloat16", DType::bf16},
    {"f32", DType::f32},     {"f16", DType::f16},     {"bf16", DType::bf16},
};

Device choose_device(const Choices& choices) {
  const int threads = choices.threads.value_or(0);
  if (choices.target) return cpu_device(*choices.target, threads);
  const Device device = default_device();
  return threads == 0 ? device : cpu_device(device.target, threads);
}

/// Whether the policy is the path of a file, which may be another at each call.
bool has_policy_file(const Choices& choices) {
  return choices.policy && choices.policy->find('=') == std::string::npos;
}

PlanOptions choose_options(const Choices& choices) {
  PlanOptions options;
  options.chunk_tokens = choices.chunk_tokens.value_or(0);
  if (has_policy_file(choices)) {
    options.policy_file = std::make_shared<const PolicyFile>(load_policy_file(*choices.policy));
  } else if (choices.policy) {
    options.policy = parse_policy(*choices.policy);
  }
  return options;
}

void require_shape(const Array& array, const char* name, const std::vector<std::int64_t>& allowed) {
  if (array.shape != allowed) refuse(name, "shape " + shape_text(array.shape), shape_text(allowed));
}

void require_dtype(const Array& array, const char* name, std::string_view allowed) {
  const std::string_view given = to_string(array.dtype);
  if (given != allowed) refuse(name, "dtype " + std::string(given), std::string(allowed) + ", as the plan says");
}

TensorView view(const Array& array) { return {array.data, array.strides[0], array.strides[1], array.strides[2]}; }

/// Rows that share elements would be written twice.
void require_apart(const Array& out) {
  for (std::size_t i = 0; i + 1 < out.shape.size(); ++i) {
    if (out.shape[i] > 1 && out.strides[i] == 0) {
      refuse("out", "a broadcast array (dim " + std::to_string(i) + " has stride 0)",
             "one with memory for each element");
    }
  }
}

}  // namespace

DType parse_dtype(std::string_view name, const char* argument) {
  for (const auto& [text, dtype] : kDtypes) {
    if (name == text) return dtype;
  }
  refuse(argument, "'" + std::string(name) + "'", "float32, float16, bfloat16");
}

KvFormat parse_format(std::string_view name, const char* argument) {
  for (const KvFormat format :
       {KvFormat::f8_e4m3, KvFormat::mlx_int8, KvFormat::mlx_int4, KvFormat::q8_0, KvFormat::q4_0}) {
    if (name == to_string(format)) return format;
  }
  return static_cast<KvFormat>(parse_dtype(name, argument));  // they agree in order
}

std::shared_ptr<BoundPlan> make_bound_plan(const Problem& problem, const Choices& choices) {
  return std::make_shared<BoundPlan>(make_plan(problem, choose_device(choices), choose_options(choices)));
}

std::shared_ptr<BoundPlan> find_plan(const Problem& problem, const Choices& choices) {
  if (has_policy_file(choices)) return make_bound_plan(problem, choices);
  static PlanCache& cache = *new PlanCache();  // Python's objects must not outlive Python: never destroyed
  const std::shared_ptr<CachedPlan> cached = cache.find(problem, choose_device(choices), choose_options(choices));
  if (cached->attachment == nullptr)
    cached->attachment = std::make_shared<BoundPlan>(cached->plan);  // the GIL guards it
  return std::static_pointer_cast<BoundPlan>(cached->attachment);
}

BoundPlan::Workspace BoundPlan::take_workspace() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      Workspace workspace = std::move(idle_.back());
      idle_.pop_back();
      return workspace;
    }
  }
  return std::make_unique_for_overwrite<std::byte[]>(plan_.workspace_bytes());
}

void BoundPlan::put_workspace(Workspace workspace) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(workspace));
}

nb::object BoundPlan::attend(nb::handle q, nb::handle k, nb::handle v, nb::handle kv_lens, nb::handle kv_starts,
                             nb::handle sinks, nb::handle out, bool return_lse) {
  return run(q, import_array(q, "q"), import_array(k, "k"), import_array(v, "v"), kv_lens, kv_starts, sinks, out,
             return_lse);
}

nb::object BoundPlan::run(nb::handle like, const Array& q, const Array& k, const Array& v, nb::handle kv_lens,
                          nb::handle kv_starts, nb::handle sinks, nb::handle out, bool return_lse) {
  const Problem& problem = plan_.problem();
  require_shape(q, "q", {problem.num_seqs, problem.num_q_heads, problem.q_len, problem.head_dim_qk});
  if (k.shape.size() != 4) refuse("k", "shape " + shape_text(k.shape), "[num_seqs, num_kv_heads, kv_len, head_dim_qk]");
  const std::int64_t kv_len = k.shape[2];
  require_shape(k, "k", {problem.num_seqs, problem.num_kv_heads, kv_len, problem.head_dim_qk});
  require_shape(v, "v", {problem.num_seqs, problem.num_kv_heads, kv_len, problem.dim_v()});
  require_dtype(q, "q", to_string(problem.q_dtype));
  require_dtype(k, "k", to_string(problem.k_format));
  require_dtype(v, "v", to_string(problem.v_format));
  require_unit_last_stride(q, "q");
  require_unit_last_stride(k, "k");
  require_unit_last_stride(v, "v");

  Inputs inputs;
  inputs.q = view(q);
  inputs.k = view(k);
  inputs.v = view(v);
  std::vector<std::int32_t> lens;
  if (!kv_lens.is_none()) {
    lens = import_lengths(kv_lens, "kv_lens", problem.num_seqs);
    for (std::size_t s = 0; s < lens.size(); ++s) {
      if (lens[s] > kv_len) {  // the library knows the plan's maximum, not the array's
        refuse("kv_lens[" + std::to_string(s) + "]", std::to_string(lens[s]),
               "0 to kv_len = " + std::to_string(kv_len));
      }
    }
  } else {
    if (kv_len > problem.max_kv_len) {
      refuse("k", "kv_len " + std::to_string(kv_len) + " without kv_lens",
             "0 to max_kv_len = " + std::to_string(problem.max_kv_len));
    }
    lens.assign(static_cast<std::size_t>(problem.num_seqs), static_cast<std::int32_t>(kv_len));
  }
  inputs.kv_lens = lens.data();
  std::vector<std::int32_t> starts;
  if (!kv_starts.is_none()) {
    starts = import_lengths(kv_starts, "kv_starts", problem.num_seqs);
    inputs.kv_starts = starts.data();
  }
  std::vector<float> sink_values;
  if (!sinks.is_none()) {
    sink_values = import_floats(sinks, "sinks", problem.num_q_heads);
    inputs.sinks = sink_values.data();
  }

  const std::vector<std::int64_t> out_shape = {problem.num_seqs, problem.num_q_heads, problem.q_len, problem.dim_v()};
  Result result;
  if (out.is_none()) {
    result = make_result(like, problem.out_dtype, out_shape);
  } else {
    result.array = import_array(out, "out", true);
    result.object = nb::borrow(out);
    require_shape(result.array, "out", out_shape);
    require_dtype(result.array, "out", to_string(problem.out_dtype));
    require_unit_last_stride(result.array, "out");
    require_apart(result.array);
    if (result.array.data != nullptr &&
        (result.array.data == q.data || result.array.data == k.data || result.array.data == v.data)) {
      refuse("out", "the memory of an input", "memory of its own");
    }
  }
  Outputs outputs;
  outputs.out = result.array.data;
  outputs.out_seq_stride = result.array.strides[0];
  outputs.out_head_stride = result.array.strides[1];
  outputs.out_token_stride = result.array.strides[2];
  Result lse;
  if (return_lse) {
    lse = make_result(like, DType::f32, {problem.num_seqs, problem.num_q_heads, problem.q_len});
    outputs.lse = static_cast<float*>(lse.array.data);
    outputs.lse_seq_stride = lse.array.strides[0];
    outputs.lse_head_stride = lse.array.strides[1];
    outputs.lse_token_stride = lse.array.strides[2];
  }
  {
    const nb::gil_scoped_release released;
    Workspace workspace = take_workspace();
    kvonce::attend(plan_, inputs, outputs, workspace.get(), plan_.workspace_bytes());
    put_workspace(std::move(workspace));
  }
  if (return_lse) return nb::make_tuple(result.finish(), lse.finish());
  return result.finish();
}

}  // namespace kvonce::python
