#include "plans.hpp"

#include <algorithm>
#include <charconv>
#include <utility>

namespace kvonce::python {
namespace {

constexpr std::pair<std::string_view, DType> kDtypes[] = {
    {"float32", DType::f32}, {"float16", DType::f16}, {"bfloat16", DType::bf16},
    {"f32", DType::f32},     {"f16", DType::f16},     {"bf16", DType::bf16},
};

Device choose_device(Place place, const Choices& choices) {
  if (place.is_cuda()) {
    const std::string none = "None on " + to_string(place);
    if (choices.target) refuse("target", "'" + *choices.target + "'", none);
    if (choices.threads) refuse("threads", std::to_string(*choices.threads), none);
    return cuda_device(place.ordinal);
  }
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

/// Lengths, starts and sinks of a call: copies on the CPU, the caller's own memory on a CUDA device.
class Vectors {
 public:
  Vectors(const Problem& problem, Place place, const CallArguments& given, Inputs& inputs) {
    const auto take = [&](nb::handle object, const char* name, std::int64_t count, auto import_host, auto import_device,
                          auto& host, Array& device) {
      if (object.is_none()) return;
      if (place.is_cpu()) {
        host = import_host(object, name, count);
      } else {
        device = import_device(object, name, count, place);
      }
    };
    take(given.kv_lens, "kv_lens", problem.num_seqs, import_lengths, import_device_lengths, lens_, device_lens_);
    take(given.kv_starts, "kv_starts", problem.num_seqs, import_lengths, import_device_lengths, starts_,
         device_starts_);
    take(given.sinks, "sinks", problem.num_q_heads, import_floats, import_device_floats, sinks_, device_sinks_);
    take(given.alibi_slopes, "alibi_slopes", problem.num_q_heads, import_floats, import_device_floats, alibi_slopes_,
         device_alibi_slopes_);
    take(given.mask_slopes, "mask_slopes", problem.num_q_heads, import_floats, import_device_floats, mask_slopes_,
         device_mask_slopes_);
    inputs.kv_lens = pointer(lens_, device_lens_);
    inputs.kv_starts = pointer(starts_, device_starts_);
    inputs.sinks = pointer(sinks_, device_sinks_);
    inputs.alibi_slopes = pointer(alibi_slopes_, device_alibi_slopes_);
    inputs.mask_slopes = pointer(mask_slopes_, device_mask_slopes_);
  }

 private:
  template <typename T>
  static const T* pointer(const std::vector<T>& host, const Array& device) {
    return host.empty() ? static_cast<const T*>(device.data) : host.data();
  }

  std::vector<std::int32_t> lens_;
  std::vector<std::int32_t> starts_;
  std::vector<float> sinks_;
  std::vector<float> alibi_slopes_;
  std::vector<float> mask_slopes_;
  Array device_lens_;
  Array device_starts_;
  Array device_sinks_;
  Array device_alibi_slopes_;
  Array device_mask_slopes_;
};

/// Broadcasts a mask to [num_seqs, num_q_heads, q_len, kv_len] by strides of 0, as NumPy does.
void broadcast_mask(const Mask& mask, const Problem& problem, std::int64_t kv_len, Inputs& inputs) {
  if (mask.kind != problem.mask || (mask.kind == MaskKind::additive && mask.array.dtype != problem.mask_dtype)) {
    const auto text = [](MaskKind kind, DType dtype) {
      return std::string(to_string(kind)) + (kind == MaskKind::additive ? " " + std::string(to_string(dtype)) : "");
    };
    refuse("mask", text(mask.kind, mask.array.dtype), text(problem.mask, problem.mask_dtype) + ", as the plan says");
  }
  const std::vector<std::int64_t> full = {problem.num_seqs, problem.num_q_heads, problem.q_len, kv_len};
  const std::vector<std::int64_t>& shape = mask.array.shape;
  std::int64_t strides[4] = {0, 0, 0, 0};
  bool fits = shape.size() <= full.size();
  for (std::size_t i = 0; fits && i < shape.size(); ++i) {
    const std::size_t axis = full.size() - shape.size() + i;
    fits = shape[i] == full[axis] || shape[i] == 1;
    strides[axis] = shape[i] == 1 ? 0 : mask.array.strides[i];
  }
  if (!fits) refuse("mask", "shape " + shape_text(shape), "one that broadcasts to " + shape_text(full));
  inputs.mask = mask.array.data;
  inputs.mask_seq_stride = strides[0];
  inputs.mask_head_stride = strides[1];
  inputs.mask_row_stride = strides[2];
  inputs.mask_token_stride = strides[3];
}

bool is_mlx(KvFormat format) { return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4; }

/// The scales and biases of K and V: kept alive while the call runs.
class SideArrays {
 public:
  SideArrays(const Problem& problem, Place place, std::int64_t kv_len, const CallArguments& given, Inputs& inputs) {
    struct Side {
      nb::handle object;
      const char* name;
      bool is_k;
      TensorView& view;
    };
    const Side sides[] = {{given.k_scales, "k_scales", true, inputs.k_scales},
                          {given.k_biases, "k_biases", true, inputs.k_biases},
                          {given.v_scales, "v_scales", false, inputs.v_scales},
                          {given.v_biases, "v_biases", false, inputs.v_biases}};
    for (std::size_t i = 0; i < std::size(sides); ++i) {
      const Side& side = sides[i];
      const KvFormat format = side.is_k ? problem.k_format : problem.v_format;
      const std::string format_name = (side.is_k ? "k_format " : "v_format ") + std::string(to_string(format));
      if (!is_mlx(format)) {
        if (!side.object.is_none()) refuse(side.name, "an array", "None with " + format_name);
        continue;
      }
      if (side.object.is_none()) refuse(side.name, "None", "an array, as " + format_name + " has it");
      Array& array = arrays_[i];
      array = import_array(side.object, side.name);
      put_heads_first(array, given.tokens_first);
      const std::int64_t dim = side.is_k ? problem.head_dim_qk : problem.dim_v();
      require_place(array, side.name, place);
      require_shape(array, side.name, {problem.num_seqs, problem.num_kv_heads, kv_len, dim / problem.quant_group});
      require_dtype(array, side.name, to_string(problem.scales_dtype));
      require_unit_last_stride(array, side.name);
      side.view = view(array);
    }
  }

 private:
  Array arrays_[4];
};

/// What the driver's thread tells of graphs that are gone.
struct Released {
  std::mutex mutex;
  std::vector<std::uintptr_t> tokens;
};

Released& released_tokens() {
  static Released& released = *new Released();  // never destroyed: the driver may call after static destruction
  return released;
}

void on_release(void* token) {
  Released& released = released_tokens();
  const std::lock_guard lock(released.mutex);
  released.tokens.push_back(reinterpret_cast<std::uintptr_t>(token));
}

nb::object make_device_workspaces(const Plan& plan) {
  const nb::module_ workspaces = nb::module_::import_("kvonce._workspaces");
  const int ordinal = plan.device().ordinal;
  const nb::object allocate =
      nb::module_::import_("functools").attr("partial")(workspaces.attr("allocate"), plan.workspace_bytes(), ordinal);
  const nb::object prepare = nb::cpp_function([plan](std::uintptr_t address, std::uintptr_t stream) {
    Context context;
    context.cuda_stream = reinterpret_cast<void*>(stream);
    prepare_workspace(plan, reinterpret_cast<void*>(address), plan.workspace_bytes(), context);
  });
  const nb::object retain = nb::cpp_function([ordinal](std::uintptr_t stream, std::uintptr_t token) {
    cuda_retain_in_capture(reinterpret_cast<void*>(stream), ordinal, on_release, reinterpret_cast<void*>(token));
  });
  return workspaces.attr("Workspaces")(allocate, prepare, retain);
}

std::uintptr_t current_torch_stream(int ordinal) {
  static const nb::object& get =
      *new nb::object(nb::module_::import_("torch").attr("_C").attr("_cuda_getCurrentRawStream"));
  return nb::cast<std::uintptr_t>(get(ordinal));
}

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

Array import_cache(nb::handle object, const char* name, KvFormat format) {
  if (is_mlx(format)) return import_codes(object, name, format == KvFormat::mlx_int8 ? 8 : 4);
  if (format != KvFormat::f32 && format != KvFormat::f16 && format != KvFormat::bf16) {
    throw Error(ErrorCode::Unsupported, std::string(name) + ": format " + std::string(to_string(format)) +
                                            " is not taken from arrays yet; allowed: float32, float16, bfloat16, "
                                            "mlx_int8, mlx_int4");
  }
  Array array = import_array(object, name);
  require_dtype(array, name, to_string(format));
  return array;
}

bool parse_layout(std::string_view name) {
  if (name == "BHSD" || name == "BSHD") return name == "BSHD";
  if (name == "NHD" || name == "HND") {
    throw Error(ErrorCode::Unsupported, "kv_layout " + std::string(name) +
                                            ": paged caches are not served yet; gather the pages into BHSD or BSHD");
  }
  refuse("kv_layout", "'" + std::string(name) + "'", "BHSD, BSHD");
}

void put_heads_first(Array& array, bool tokens_first) {
  if (!tokens_first || array.shape.size() != 4) return;
  std::swap(array.shape[1], array.shape[2]);
  std::swap(array.strides[1], array.strides[2]);
}

void name_scales(const CallArguments& arguments, Problem& problem) {
  if (!is_mlx(problem.k_format) && !is_mlx(problem.v_format)) return;
  const bool of_k = is_mlx(problem.k_format);
  const char* name = of_k ? "k_scales" : "v_scales";
  const nb::handle object = of_k ? arguments.k_scales : arguments.v_scales;
  const std::int64_t dim = of_k ? problem.head_dim_qk : problem.dim_v();
  if (object.is_none()) {
    const KvFormat format = of_k ? problem.k_format : problem.v_format;
    refuse(
        name, "None",
        "an array, as " + std::string(of_k ? "k_format " : "v_format ") + std::string(to_string(format)) + " has it");
  }
  const Array scales = import_array(object, name);
  const std::int64_t groups = scales.shape.empty() ? 0 : scales.shape.back();
  if (groups <= 0 || dim % groups != 0) {
    refuse(name, "shape " + shape_text(scales.shape),
           "[num_seqs, num_kv_heads, kv_len, " + std::to_string(dim) + " / group size]");
  }
  problem.quant_group = dim / groups;
  problem.scales_dtype = scales.dtype;
}

MaskKind parse_mask(std::string_view name) {
  for (const MaskKind kind : {MaskKind::boolean, MaskKind::additive}) {
    if (name == to_string(kind)) return kind;
  }
  refuse("mask", "'" + std::string(name) + "'", "boolean, additive");
}

Place parse_place(std::string_view name) {
  if (name == "cpu") return {};
  Place place{nb::device::cuda::value, 0};
  if (name == "cuda") return place;
  const std::string_view number = name.substr(std::min<std::size_t>(5, name.size()));
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), place.ordinal);
  if (!name.starts_with("cuda:") || error != std::errc() || end != number.data() + number.size() || place.ordinal < 0) {
    refuse("device", "'" + std::string(name) + "'", "cpu, cuda, cuda:0, cuda:1, ...");
  }
  return place;
}

std::shared_ptr<BoundPlan> make_bound_plan(const Problem& problem, Place place, const Choices& choices) {
  return std::make_shared<BoundPlan>(make_plan(problem, choose_device(place, choices), choose_options(choices)));
}

std::shared_ptr<BoundPlan> find_plan(const Problem& problem, Place place, const Choices& choices) {
  if (has_policy_file(choices)) return make_bound_plan(problem, place, choices);
  static PlanCache& cache = *new PlanCache();  // never destroyed: Python's objects must not outlive Python
  const std::shared_ptr<CachedPlan> cached =
      cache.find(problem, choose_device(place, choices), choose_options(choices));
  if (cached->attachment == nullptr)
    cached->attachment = std::make_shared<BoundPlan>(cached->plan);  // the GIL guards it
  return std::static_pointer_cast<BoundPlan>(cached->attachment);
}

nb::object attend_through_torch(const Attend& attend, nb::handle q, nb::handle k, nb::handle v,
                                const CallArguments& a) {
  for (const auto& [object, name] :
       {std::pair{a.alibi_slopes, "alibi_slopes"}, std::pair{a.mask, "mask"}, std::pair{a.mask_slopes, "mask_slopes"},
        std::pair{a.k_scales, "k_scales"}, std::pair{a.v_scales, "v_scales"}}) {
    if (!object.is_none()) {
      throw Error(ErrorCode::Unsupported,
                  std::string(name) + " is not served by the cuda backend yet; run such layers elsewhere");
    }
  }
  const nb::object attend_tensors = nb::cpp_function(
      [&attend, return_lse = a.return_lse, tokens_first = a.tokens_first](
          nb::handle q2, nb::handle k2, nb::handle v2, nb::handle kv_lens, nb::handle kv_starts, nb::handle sinks,
          nb::handle out, std::uintptr_t stream) {
        CallArguments arguments{kv_lens, kv_starts, sinks, out, return_lse, stream};
        arguments.tokens_first = tokens_first;
        return attend(q2, k2, v2, arguments);
      },
      nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("kv_lens").none(), nb::arg("kv_starts").none(),
      nb::arg("sinks").none(), nb::arg("out").none(), nb::arg("stream"));
  const nb::object stream = a.stream ? nb::object(nb::int_(*a.stream)) : nb::none();
  return nb::module_::import_("kvonce._workspaces")
      .attr("through_torch")(attend_tensors, nb::make_tuple(q, k, v, a.kv_lens, a.kv_starts, a.sinks), a.out,
                             a.return_lse, stream);
}

std::vector<std::uintptr_t> released_captures() {
  Released& released = released_tokens();
  const std::lock_guard lock(released.mutex);
  return std::exchange(released.tokens, {});
}

Place BoundPlan::place() const noexcept {
  const Device& device = plan_.device();
  return device.backend == Backend::cuda ? Place{nb::device::cuda::value, device.ordinal} : Place();
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

void BoundPlan::run_on_cpu(const Inputs& inputs, const Outputs& outputs) {
  const nb::gil_scoped_release released;
  Workspace workspace = take_workspace();
  kvonce::attend(plan_, inputs, outputs, workspace.get(), plan_.workspace_bytes());
  put_workspace(std::move(workspace));
}

void BoundPlan::run_on_cuda(const Inputs& inputs, const Outputs& outputs, std::optional<std::uintptr_t> given_stream) {
  const int ordinal = plan_.device().ordinal;
  const std::uintptr_t stream = given_stream ? *given_stream : current_torch_stream(ordinal);
  Context context;
  context.cuda_stream = reinterpret_cast<void*>(stream);
  nb::object workspace;  // keeps the memory
  void* address = nullptr;
  if (plan_.workspace_bytes() > 0) {
    if (!device_workspaces_.is_valid()) device_workspaces_ = make_device_workspaces(plan_);
    workspace = device_workspaces_.attr("take")(stream, cuda_capture_id(context.cuda_stream, ordinal));
    address = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(nb::object(workspace[0])));
  }
  const nb::gil_scoped_release released;
  kvonce::attend(plan_, inputs, outputs, address, plan_.workspace_bytes(), context);
}

nb::object BoundPlan::attend(nb::handle q, nb::handle k, nb::handle v, const CallArguments& arguments) {
  if (is_foreign_cuda(q)) return attend_through_torch(std::bind_front(&BoundPlan::attend, this), q, k, v, arguments);
  Array k_array = import_cache(k, "k", plan_.problem().k_format);
  Array v_array = import_cache(v, "v", plan_.problem().v_format);
  put_heads_first(k_array, arguments.tokens_first);
  put_heads_first(v_array, arguments.tokens_first);
  return run(q, import_array(q, "q"), k_array, v_array, import_mask(arguments.mask), arguments);
}

nb::object BoundPlan::run(nb::handle like, const Array& q, const Array& k, const Array& v, const Mask& mask,
                          const CallArguments& arguments) {
  const Problem& problem = plan_.problem();
  require_shape(q, "q", {problem.num_seqs, problem.num_q_heads, problem.q_len, problem.head_dim_qk});
  if (k.shape.size() != 4) refuse("k", "shape " + shape_text(k.shape), "[num_seqs, num_kv_heads, kv_len, head_dim_qk]");
  const std::int64_t kv_len = k.shape[2];
  require_shape(k, "k", {problem.num_seqs, problem.num_kv_heads, kv_len, problem.head_dim_qk});
  require_shape(v, "v", {problem.num_seqs, problem.num_kv_heads, kv_len, problem.dim_v()});
  require_dtype(q, "q", to_string(problem.q_dtype));
  for (const auto& [array, name] : {std::pair{&q, "q"}, std::pair{&k, "k"}, std::pair{&v, "v"}}) {
    require_unit_last_stride(*array, name);
    require_place(*array, name, place());
  }
  if (arguments.stream && place().is_cpu()) refuse("stream", std::to_string(*arguments.stream), "None for CPU memory");
  if (kv_len > problem.max_kv_len && arguments.kv_lens.is_none()) {
    refuse("k", "kv_len " + std::to_string(kv_len) + " without kv_lens",
           "0 to max_kv_len = " + std::to_string(problem.max_kv_len));
  }

  Inputs inputs;
  inputs.q = view(q);
  inputs.k = view(k);
  inputs.v = view(v);
  inputs.kv_len = std::min(kv_len, problem.max_kv_len);
  const Vectors vectors(problem, place(), arguments, inputs);
  const SideArrays side_arrays(problem, place(), kv_len, arguments, inputs);
  if (mask.kind != MaskKind::none) {
    require_place(mask.array, "mask", place());
    broadcast_mask(mask, problem, kv_len, inputs);
  }

  const std::vector<std::int64_t> out_shape = {problem.num_seqs, problem.num_q_heads, problem.q_len, problem.dim_v()};
  Result result;
  if (arguments.out.is_none()) {
    result = make_result(like, problem.out_dtype, out_shape);
  } else {
    result.array = import_array(arguments.out, "out", true);
    result.object = nb::borrow(arguments.out);
    require_place(result.array, "out", place());
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
  if (arguments.return_lse) {
    lse = make_result(like, DType::f32, {problem.num_seqs, problem.num_q_heads, problem.q_len});
    outputs.lse = static_cast<float*>(lse.array.data);
    outputs.lse_seq_stride = lse.array.strides[0];
    outputs.lse_head_stride = lse.array.strides[1];
    outputs.lse_token_stride = lse.array.strides[2];
  }
  if (place().is_cuda()) {
    run_on_cuda(inputs, outputs, arguments.stream);
  } else {
    run_on_cpu(inputs, outputs);
  }
  if (arguments.return_lse) return nb::make_tuple(result.finish(), lse.finish());
  return result.finish();
}

}  // namespace kvonce::python
