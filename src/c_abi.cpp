// The C ABI over the public C++ API: converts versioned structs, and turns every exception into a status and a message.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include "kvonce/kvonce.h"
#include "kvonce/kvonce.hpp"

struct kvonce_plan {
  kvonce::Plan plan;
  std::string kernel_id;  // NUL-terminated copy for kvonce_plan_kernel_id
};

namespace {

using kvonce::Error;
using kvonce::ErrorCode;

static_assert(KVONCE_INVALID_ARGUMENT == static_cast<int>(ErrorCode::InvalidArgument));
static_assert(KVONCE_UNSUPPORTED == static_cast<int>(ErrorCode::Unsupported));
static_assert(KVONCE_UNAVAILABLE == static_cast<int>(ErrorCode::Unavailable));
static_assert(KVONCE_INTERNAL == static_cast<int>(ErrorCode::Internal));
static_assert(KVONCE_DTYPE_BF16 == static_cast<int>(kvonce::DType::bf16));
static_assert(KVONCE_KV_Q4_0 == static_cast<int>(kvonce::KvFormat::q4_0));
static_assert(KVONCE_MASK_TREE == static_cast<int>(kvonce::MaskKind::tree));
static_assert(KVONCE_LAYOUT_PAGED_HND == static_cast<int>(kvonce::KvLayout::paged_hnd));
static_assert(KVONCE_BACKEND_METAL == static_cast<int>(kvonce::Backend::metal));
// attend allocates nothing, so a caller's segments are read in place.
static_assert(std::is_standard_layout_v<kvonce::Segment> && sizeof(kvonce::Segment) == sizeof(kvonce_segment));
static_assert(offsetof(kvonce::Segment, token_end) == offsetof(kvonce_segment, token_end));

// A fixed buffer: storing a message must not fail.
thread_local std::array<char, 2048> last_error{};

kvonce_status fail(kvonce_status status, const char* message) noexcept {
  const std::size_t length = std::min(std::strlen(message), last_error.size() - 1);
  std::memcpy(last_error.data(), message, length);
  last_error[length] = '\0';
  return status;
}

template <typename Body>
kvonce_status guarded(Body&& body) noexcept {
  try {
    body();
    return KVONCE_OK;
  } catch (const Error& error) {
    return fail(static_cast<kvonce_status>(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(KVONCE_INTERNAL, "out of memory");
  } catch (const std::exception& error) {
    return fail(KVONCE_INTERNAL, error.what());
  } catch (...) {
    return fail(KVONCE_INTERNAL, "an unknown exception was thrown");
  }
}

[[noreturn]] void invalid(const std::string& message) { throw Error(ErrorCode::InvalidArgument, message); }

void require_pointer(const void* pointer, const char* name) {
  if (pointer == nullptr) invalid(std::string(name) + ": got NULL; allowed: a valid pointer");
}

// The defaults of each struct and the sizes of the prefixes that may be given instead of the whole.
template <typename T>
struct Versioned;

template <>
struct Versioned<kvonce_problem> {
  static constexpr const char* kName = "problem";
  static constexpr std::size_t kBasicSize = KVONCE_PROBLEM_BASIC_SIZE;
  static kvonce_problem defaults() noexcept {
    kvonce_problem problem{};
    problem.num_seqs = 1;
    problem.q_len = 1;
    problem.causal = 1;
    return problem;
  }
};

template <>
struct Versioned<kvonce_options> {
  static constexpr const char* kName = "options";
  static constexpr std::size_t kBasicSize = KVONCE_OPTIONS_BASIC_SIZE;
  static kvonce_options defaults() noexcept { return {}; }
};

template <>
struct Versioned<kvonce_inputs> {
  static constexpr const char* kName = "inputs";
  static constexpr std::size_t kBasicSize = KVONCE_INPUTS_BASIC_SIZE;
  static kvonce_inputs defaults() noexcept {
    kvonce_inputs inputs{};
    inputs.mask_token_stride = 1;
    inputs.kv_len = -1;
    return inputs;
  }
};

template <>
struct Versioned<kvonce_outputs> {
  static constexpr const char* kName = "outputs";
  static constexpr std::size_t kBasicSize = KVONCE_OUTPUTS_BASIC_SIZE;
  static kvonce_outputs defaults() noexcept { return {}; }
};

template <>
struct Versioned<kvonce_context> {
  static constexpr const char* kName = "context";
  static constexpr std::size_t kBasicSize = KVONCE_CONTEXT_BASIC_SIZE;
  static kvonce_context defaults() noexcept { return {}; }
};

template <>
struct Versioned<kvonce_merge_inputs> {
  static constexpr const char* kName = "inputs";
  static constexpr std::size_t kBasicSize = sizeof(kvonce_merge_inputs);
  static kvonce_merge_inputs defaults() noexcept {
    kvonce_merge_inputs inputs{};
    inputs.lse_row_stride = 1;
    return inputs;
  }
};

template <>
struct Versioned<kvonce_device> {
  static constexpr const char* kName = "device";
  static constexpr std::size_t kBasicSize = sizeof(kvonce_device);
  static kvonce_device defaults() noexcept { return {}; }
};

template <typename T>
void check_size(std::size_t struct_size) {
  const std::size_t basic_size = Versioned<T>::kBasicSize;
  if (struct_size >= sizeof(T)) return;
  if (struct_size == basic_size) return;
  std::string allowed = std::to_string(sizeof(T)) + " or more";
  if (basic_size != sizeof(T)) allowed = std::to_string(basic_size) + ", " + allowed;
  invalid(std::string(Versioned<T>::kName) + ".struct_size: got " + std::to_string(struct_size) +
          "; allowed: " + allowed);
}

// Writes the first struct_size bytes of `value`, with that size, and zeros past the struct this library knows.
template <typename T>
void write_struct(T* destination, std::size_t struct_size, T value) {
  value.struct_size = struct_size;
  const std::size_t known_bytes = std::min(struct_size, sizeof(T));
  auto* bytes = reinterpret_cast<unsigned char*>(destination);
  std::memcpy(bytes, &value, known_bytes);
  std::fill(bytes + known_bytes, bytes + struct_size, static_cast<unsigned char>(0));
}

template <typename T>
kvonce_status init_struct(T* destination, std::size_t struct_size) noexcept {
  return guarded([&] {
    require_pointer(destination, Versioned<T>::kName);
    check_size<T>(struct_size);
    write_struct(destination, struct_size, Versioned<T>::defaults());
  });
}

// The caller's struct with defaults for what it is too short to hold.
template <typename T>
T read_struct(const T* source) {
  require_pointer(source, Versioned<T>::kName);
  std::size_t struct_size = 0;
  std::memcpy(&struct_size, source, sizeof(struct_size));
  check_size<T>(struct_size);
  T value = Versioned<T>::defaults();
  std::memcpy(&value, source, std::min(struct_size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(source);
  for (std::size_t i = sizeof(T); i < struct_size; ++i) {
    if (bytes[i] != 0) {
      invalid(std::string(Versioned<T>::kName) + ": byte " + std::to_string(i) +
              " is set in a field that this library does not know; allowed: 0 past byte " + std::to_string(sizeof(T)));
    }
  }
  return value;
}

template <typename Enum>
Enum to_enum(std::int32_t value, Enum last, const char* name) {
  const auto max_value = static_cast<std::int32_t>(last);
  if (value < 0 || value > max_value) {
    invalid(std::string(name) + ": got " + std::to_string(value) + "; allowed: 0.." + std::to_string(max_value));
  }
  return static_cast<Enum>(value);
}

bool to_flag(std::int32_t value, const char* name) {
  if (value != 0 && value != 1) invalid(std::string(name) + ": got " + std::to_string(value) + "; allowed: 0 or 1");
  return value == 1;
}

void require_zero(std::int32_t value, const char* name) {
  if (value != 0) invalid(std::string(name) + ": got " + std::to_string(value) + "; allowed: 0");
}

kvonce::Problem to_problem(const kvonce_problem& c) {
  kvonce::Problem problem;
  problem.num_seqs = c.num_seqs;
  problem.q_len = c.q_len;
  problem.num_q_heads = c.num_q_heads;
  problem.num_kv_heads = c.num_kv_heads;
  problem.head_dim_qk = c.head_dim_qk;
  problem.head_dim_v = c.head_dim_v;
  problem.max_kv_len = c.max_kv_len;
  problem.q_dtype = to_enum(c.q_dtype, kvonce::DType::bf16, "q_dtype");
  problem.out_dtype = to_enum(c.out_dtype, kvonce::DType::bf16, "out_dtype");
  problem.k_format = to_enum(c.k_format, kvonce::KvFormat::q4_0, "k_format");
  problem.v_format = to_enum(c.v_format, kvonce::KvFormat::q4_0, "v_format");
  problem.causal = to_flag(c.causal, "causal");
  if (to_flag(c.has_scale, "has_scale")) problem.scale = c.scale;
  problem.softcap = c.softcap;
  problem.window = c.window;
  problem.quant_group = c.quant_group;
  problem.page_size = c.page_size;
  problem.layout = to_enum(c.layout, kvonce::KvLayout::paged_hnd, "layout");
  problem.mask = to_enum(c.mask, kvonce::MaskKind::tree, "mask");
  problem.v_is_k_prefix = to_flag(c.v_is_k_prefix, "v_is_k_prefix");
  problem.has_sinks = to_flag(c.has_sinks, "has_sinks");
  problem.has_alibi = to_flag(c.has_alibi, "has_alibi");
  problem.has_mask_slopes = to_flag(c.has_mask_slopes, "has_mask_slopes");
  problem.has_segments = to_flag(c.has_segments, "has_segments");
  problem.mask_dtype = to_enum(c.mask_dtype, kvonce::DType::bf16, "mask_dtype");
  problem.scales_dtype = to_enum(c.scales_dtype, kvonce::DType::bf16, "scales_dtype");
  require_zero(c.reserved, "reserved");
  return problem;
}

kvonce::PlanOptions to_options(const kvonce_options& c) {
  require_zero(c.reserved, "reserved");
  kvonce::PlanOptions options;
  options.chunk_tokens = c.chunk_tokens;
  if (c.policy != nullptr) options.policy = kvonce::parse_policy(c.policy);
  options.earlier_kv_ready = to_flag(c.earlier_kv_ready, "earlier_kv_ready");
  return options;
}

kvonce::TensorView to_tensor(const kvonce_tensor& c) {
  kvonce::TensorView tensor;
  tensor.data = c.data;
  tensor.seq_stride = c.seq_stride;
  tensor.head_stride = c.head_stride;
  tensor.token_stride = c.token_stride;
  return tensor;
}

kvonce::Inputs to_inputs(const kvonce_inputs& c) {
  kvonce::Inputs inputs;
  inputs.q = to_tensor(c.q);
  inputs.k = to_tensor(c.k);
  inputs.v = to_tensor(c.v);
  inputs.kv_lens = c.kv_lens;
  inputs.kv_starts = c.kv_starts;
  inputs.mask = c.mask;
  inputs.mask_seq_stride = c.mask_seq_stride;
  inputs.mask_head_stride = c.mask_head_stride;
  inputs.mask_row_stride = c.mask_row_stride;
  inputs.mask_token_stride = c.mask_token_stride;
  inputs.sinks = c.sinks;
  inputs.alibi_slopes = c.alibi_slopes;
  inputs.mask_slopes = c.mask_slopes;
  inputs.block_table = c.block_table;
  inputs.block_table_stride = c.block_table_stride;
  inputs.num_pages = c.num_pages;
  inputs.k_scales = {c.k_scales, c.k_scales_seq_stride, c.k_scales_head_stride, c.k_scales_token_stride};
  inputs.v_scales = {c.v_scales, c.v_scales_seq_stride, c.v_scales_head_stride, c.v_scales_token_stride};
  inputs.k_biases = {c.k_biases, c.k_biases_seq_stride, c.k_biases_head_stride, c.k_biases_token_stride};
  inputs.v_biases = {c.v_biases, c.v_biases_seq_stride, c.v_biases_head_stride, c.v_biases_token_stride};
  inputs.segments = reinterpret_cast<const kvonce::Segment*>(c.segments);
  inputs.num_segments = c.num_segments;
  inputs.kv_len = c.kv_len;
  return inputs;
}

kvonce::Outputs to_outputs(const kvonce_outputs& c) {
  kvonce::Outputs outputs;
  outputs.out = c.out;
  outputs.out_seq_stride = c.out_seq_stride;
  outputs.out_head_stride = c.out_head_stride;
  outputs.out_token_stride = c.out_token_stride;
  outputs.lse = c.lse;
  outputs.lse_seq_stride = c.lse_seq_stride;
  outputs.lse_head_stride = c.lse_head_stride;
  outputs.lse_token_stride = c.lse_token_stride;
  return outputs;
}

kvonce::Context to_context(const kvonce_context& c) {
  require_zero(c.reserved, "reserved");
  kvonce::Context context;
  context.parallel_for = c.parallel_for;
  context.parallel_for_host = c.parallel_for_host;
  context.num_threads = c.num_threads;
  context.cuda_stream = c.cuda_stream;
  return context;
}

// "cuda" or "cuda:N".
kvonce::Device cuda_device(const char* target, std::int32_t num_threads) {
  int ordinal = 0;
  const std::string_view number = target[4] == ':' ? target + 5 : "";
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), ordinal);
  const bool has_number = error == std::errc() && end == number.data() + number.size();
  if (target[4] != '\0' && !has_number) {
    invalid("target: got '" + std::string(target) + "'; allowed: cuda or cuda:N with a device's number");
  }
  if (num_threads != 0) invalid("num_threads: got " + std::to_string(num_threads) + "; allowed: 0 with target cuda");
  return kvonce::cuda_device(ordinal);
}

kvonce::Device to_device(const char* target, std::int32_t num_threads) {
  if (num_threads < 0) invalid("num_threads: got " + std::to_string(num_threads) + "; allowed: 0 (choose) or more");
  if (target != nullptr && std::strncmp(target, "cuda", 4) == 0) return cuda_device(target, num_threads);
  if (target != nullptr) return kvonce::cpu_device(target, num_threads);
  kvonce::Device device = kvonce::default_device();
  return num_threads == 0 ? device : kvonce::cpu_device(device.target, num_threads);
}

template <std::size_t kSize>
void copy_text(char (&destination)[kSize], const std::string& text) {
  const std::size_t length = std::min(text.size(), kSize - 1);
  std::memcpy(destination, text.data(), length);
  destination[length] = '\0';
}

// Writes a plan's figure for the queries that have no other error than NULL.
template <typename T, typename Query>
kvonce_status query_plan(const kvonce_plan* plan, T* destination, const char* name, Query&& query) noexcept {
  return guarded([&] {
    require_pointer(plan, "plan");
    require_pointer(destination, name);
    *destination = query(*plan);
  });
}

}  // namespace

const char* kvonce_version(void) { return KVONCE_VERSION; }

const char* kvonce_last_error(void) { return last_error.data(); }

kvonce_status kvonce_problem_init(kvonce_problem* problem, size_t struct_size) {
  return init_struct(problem, struct_size);
}
kvonce_status kvonce_options_init(kvonce_options* options, size_t struct_size) {
  return init_struct(options, struct_size);
}
kvonce_status kvonce_inputs_init(kvonce_inputs* inputs, size_t struct_size) { return init_struct(inputs, struct_size); }
kvonce_status kvonce_outputs_init(kvonce_outputs* outputs, size_t struct_size) {
  return init_struct(outputs, struct_size);
}
kvonce_status kvonce_context_init(kvonce_context* context, size_t struct_size) {
  return init_struct(context, struct_size);
}
kvonce_status kvonce_merge_inputs_init(kvonce_merge_inputs* inputs, size_t struct_size) {
  return init_struct(inputs, struct_size);
}
kvonce_status kvonce_device_init(kvonce_device* device, size_t struct_size) { return init_struct(device, struct_size); }

kvonce_status kvonce_devices(size_t* num_devices) {
  return guarded([&] {
    require_pointer(num_devices, "num_devices");
    *num_devices = kvonce::devices().size();
  });
}

kvonce_status kvonce_device_query(size_t device_idx, kvonce_device* device) {
  return guarded([&] {
    const std::size_t struct_size = read_struct(device).struct_size;
    const std::vector<kvonce::Device> devices = kvonce::devices();
    if (device_idx >= devices.size()) {
      invalid("device_idx: got " + std::to_string(device_idx) + "; allowed: less than " +
              std::to_string(devices.size()));
    }
    const kvonce::Device& found = devices[device_idx];
    kvonce_device value{};
    value.backend = static_cast<kvonce_backend>(found.backend);
    value.num_threads = found.num_threads;
    value.l1_bytes = found.l1_bytes;
    value.l2_bytes = found.l2_bytes;
    value.l3_bytes = found.l3_bytes;
    value.read_gbps = found.read_gbps;
    copy_text(value.target, found.target);
    copy_text(value.name, found.name);
    copy_text(value.unavailable, found.unavailable);
    write_struct(device, struct_size, value);
  });
}

kvonce_status kvonce_plan_create(const kvonce_problem* problem, const char* target, int32_t num_threads,
                                 const kvonce_options* options, kvonce_plan** plan) {
  return guarded([&] {
    require_pointer(plan, "plan");
    const kvonce::Problem cpp_problem = to_problem(read_struct(problem));
    const kvonce::PlanOptions cpp_options =
        options == nullptr ? kvonce::PlanOptions{} : to_options(read_struct(options));
    kvonce::Plan cpp_plan = kvonce::make_plan(cpp_problem, to_device(target, num_threads), cpp_options);
    std::string kernel_id(cpp_plan.kernel_id());
    *plan = new kvonce_plan{std::move(cpp_plan), std::move(kernel_id)};
  });
}

void kvonce_plan_destroy(kvonce_plan* plan) { delete plan; }

kvonce_status kvonce_plan_workspace_bytes(const kvonce_plan* plan, size_t* workspace_bytes) {
  return query_plan(plan, workspace_bytes, "workspace_bytes",
                    [](const kvonce_plan& p) { return p.plan.workspace_bytes(); });
}

kvonce_status kvonce_plan_read_factor(const kvonce_plan* plan, int64_t* read_factor) {
  return query_plan(plan, read_factor, "read_factor", [](const kvonce_plan& p) { return p.plan.read_factor(); });
}

kvonce_status kvonce_plan_max_chunks(const kvonce_plan* plan, int64_t* max_chunks) {
  return query_plan(plan, max_chunks, "max_chunks", [](const kvonce_plan& p) { return p.plan.max_chunks(); });
}

kvonce_status kvonce_plan_max_kv_bytes(const kvonce_plan* plan, int64_t* max_kv_bytes) {
  return query_plan(plan, max_kv_bytes, "max_kv_bytes", [](const kvonce_plan& p) { return p.plan.max_kv_bytes(); });
}

kvonce_status kvonce_plan_kernel_id(const kvonce_plan* plan, const char** kernel_id) {
  return query_plan(plan, kernel_id, "kernel_id", [](const kvonce_plan& p) { return p.kernel_id.c_str(); });
}

kvonce_status kvonce_plan_explain(const kvonce_plan* plan, char* buffer, size_t buffer_bytes, size_t* required_bytes) {
  return guarded([&] {
    require_pointer(plan, "plan");
    const std::string text = plan->plan.explain();
    const std::size_t required = text.size() + 1;
    if (required_bytes != nullptr) *required_bytes = required;
    if (buffer == nullptr && buffer_bytes == 0) return;
    require_pointer(buffer, "buffer");
    if (buffer_bytes < required) {
      invalid("buffer_bytes: got " + std::to_string(buffer_bytes) + "; allowed: " + std::to_string(required) +
              " or more");
    }
    std::memcpy(buffer, text.c_str(), required);
  });
}

kvonce_status kvonce_attend(const kvonce_plan* plan, const kvonce_inputs* inputs, const kvonce_outputs* outputs,
                            void* workspace, size_t workspace_bytes, const kvonce_context* context) {
  return guarded([&] {
    require_pointer(plan, "plan");
    const kvonce::Inputs cpp_inputs = to_inputs(read_struct(inputs));
    const kvonce::Outputs cpp_outputs = to_outputs(read_struct(outputs));
    const kvonce::Context cpp_context = context == nullptr ? kvonce::Context{} : to_context(read_struct(context));
    kvonce::attend(plan->plan, cpp_inputs, cpp_outputs, workspace, workspace_bytes, cpp_context);
  });
}

kvonce_status kvonce_prepare_workspace(const kvonce_plan* plan, void* workspace, size_t workspace_bytes,
                                       const kvonce_context* context) {
  return guarded([&] {
    require_pointer(plan, "plan");
    const kvonce::Context cpp_context = context == nullptr ? kvonce::Context{} : to_context(read_struct(context));
    kvonce::prepare_workspace(plan->plan, workspace, workspace_bytes, cpp_context);
  });
}

kvonce_status kvonce_check_workspace(const kvonce_plan* plan, void* workspace, size_t workspace_bytes,
                                     const kvonce_context* context) {
  return guarded([&] {
    require_pointer(plan, "plan");
    const kvonce::Context cpp_context = context == nullptr ? kvonce::Context{} : to_context(read_struct(context));
    kvonce::check_workspace(plan->plan, workspace, workspace_bytes, cpp_context);
  });
}

kvonce_status kvonce_merge(const kvonce_merge_inputs* inputs, float* out, int64_t out_row_stride, float* lse) {
  return guarded([&] {
    const kvonce_merge_inputs c = read_struct(inputs);
    kvonce::MergeInputs cpp_inputs;
    cpp_inputs.o = c.o;
    cpp_inputs.lse = c.lse;
    cpp_inputs.num_parts = c.num_parts;
    cpp_inputs.num_rows = c.num_rows;
    cpp_inputs.head_dim_v = c.head_dim_v;
    cpp_inputs.o_part_stride = c.o_part_stride;
    cpp_inputs.o_row_stride = c.o_row_stride;
    cpp_inputs.lse_part_stride = c.lse_part_stride;
    cpp_inputs.lse_row_stride = c.lse_row_stride;
    kvonce::merge(cpp_inputs, out, out_row_stride, lse);
  });
}
