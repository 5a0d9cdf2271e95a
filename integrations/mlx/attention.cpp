#include <mlx/backend/metal/metal.h>
#include <mlx/device.h>
#include <mlx/fast.h>
#include <mlx/ops.h>
#include <mlx/transforms.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <variant>
#include <vector>

#include "kvonce/types.hpp"
#include "kvonce_mlx.hpp"
#include "launch.hpp"

namespace kvonce::mlx {
namespace {

namespace mx = ::mlx::core;

constexpr int kMaxQLen = 64;

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

[[noreturn]] void refuse(const char* argument, const std::string& given, const std::string& allowed) {
  throw std::invalid_argument(
      text("[kvonce::mlx::scaled_dot_product_attention] ", argument, ": got ", given, ", allowed: ", allowed, "."));
}

bool is_served_dtype(mx::Dtype dtype) { return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16; }

/// The dtype of the result.
mx::Dtype check_tensors(const mx::array& q, const mx::array& k, const mx::array& v) {
  const std::pair<const char*, const mx::array&> tensors[] = {{"queries", q}, {"keys", k}, {"values", v}};
  for (const auto& [name, tensor] : tensors) {
    if (tensor.ndim() != 4) refuse(name, text("shape ", tensor.shape()), "rank 4, [num_seqs, heads, tokens, head_dim]");
    if (!is_served_dtype(tensor.dtype())) refuse(name, text("dtype ", tensor.dtype()), "float32, float16, bfloat16");
  }
  if (k.shape(0) != q.shape(0)) refuse("keys", text("shape ", k.shape()), text("a first dim of ", q.shape(0)));
  if (k.shape(3) != q.shape(3)) refuse("keys", text("shape ", k.shape()), text("a last dim of ", q.shape(3)));
  if (v.shape(0) != k.shape(0) || v.shape(1) != k.shape(1) || v.shape(2) != k.shape(2)) {
    refuse("values", text("shape ", v.shape()), text("the first three dims of keys ", k.shape()));
  }
  if (k.shape(1) == 0 || q.shape(1) % k.shape(1) != 0) {
    refuse("keys", text(k.shape(1), " heads"), text("a number that divides the ", q.shape(1), " heads of queries"));
  }
  return mx::result_type({q, k, v});
}

void check_mask(const mx::array& q, const mx::array& k, const std::string& mode, const std::optional<mx::array>& mask,
                mx::Dtype dtype) {
  if (!mode.empty() && mode != "causal" && mode != "array")
    refuse("mask_mode", "'" + mode + "'", "'', 'causal' or 'array'");
  if (mode == "causal" && mask) refuse("mask_arr", "an array beside mask_mode 'causal'", "none");
  if (mode == "array" && !mask) refuse("mask_arr", "none beside mask_mode 'array'", "an array");
  if (!mask) return;
  const mx::Shape wanted = {q.shape(0), q.shape(1), q.shape(2), k.shape(2)};
  bool fits = mask->ndim() <= 4;
  for (int i = 1; fits && i <= static_cast<int>(mask->ndim()); ++i) {
    fits = mask->shape(-i) == 1 || mask->shape(-i) == wanted[static_cast<std::size_t>(4 - i)];
  }
  if (!fits) refuse("mask_arr", text("shape ", mask->shape()), text("one that broadcasts to ", wanted));
  if (mask->dtype() != mx::bool_ && mx::promote_types(mask->dtype(), dtype) != dtype) {
    refuse("mask_arr", text("dtype ", mask->dtype()), text("bool_ or what promotes to ", dtype));
  }
}

void check_sinks(const mx::array& q, const std::optional<mx::array>& sinks, mx::Dtype dtype) {
  if (!sinks) return;
  if (sinks->ndim() != 1 || sinks->shape(0) != q.shape(1)) {
    refuse("sinks", text("shape ", sinks->shape()), text("(", q.shape(1), "), one of each query head"));
  }
  if (mx::promote_types(sinks->dtype(), dtype) != dtype) {
    refuse("sinks", text("dtype ", sinks->dtype()), text("what promotes to ", dtype));
  }
}

std::string why_not_served(const Call& call, mx::Dtype dtype, mx::StreamOrDevice s) {
  if (call.q.shape(2) > kMaxQLen) return text("prefill: more than ", kMaxQLen, " query tokens");
  if (call.q.size() == 0 || call.k.size() == 0 || call.v.size() == 0) return "an empty array";
  if (call.causal && call.q.shape(2) > call.k.shape(2)) return "a row that sees no key";
  if (call.mask && call.mask->dtype() != mx::bool_ && !is_served_dtype(call.mask->dtype())) {
    return text("a mask of dtype ", call.mask->dtype());
  }
  if (std::min({call.q.size(), call.k.size(), call.v.size()}) < kMinElements) {
    return text("fewer than ", kMinElements, " elements of q, K or V");
  }
  if (call.k.dtype() != dtype || call.v.dtype() != dtype) return "K and V of other dtypes than the result";
  if (mx::to_stream(s).device != mx::Device::gpu || !mx::metal::is_available())
    return "a device that is not an Apple GPU";
  return {};
}

Device this_gpu() {
  const auto& info = mx::metal::device_info();
  const auto found = info.find("architecture");
  const auto* name = found == info.end() ? nullptr : std::get_if<std::string>(&found->second);
  return gpu_of_architecture(name == nullptr ? "" : *name);
}

}  // namespace

mx::array attend(const metal::Decision& plan, const Call& call, mx::StreamOrDevice s) {
  std::vector<mx::array> arrays = {call.q, call.k, call.v};
  if (call.mask) arrays.push_back(*call.mask);
  if (call.sinks) arrays.push_back(*call.sinks);
  const auto unpack = [causal = call.causal, scale = call.scale, has_mask = call.mask.has_value(),
                       has_sinks = call.sinks.has_value()](const std::vector<mx::array>& a) {
    return Call{a[0],
                a[1],
                a[2],
                has_mask ? std::optional(a[3]) : std::nullopt,
                has_sinks ? std::optional(a.back()) : std::nullopt,
                scale,
                causal};
  };
  const auto by_mlx = [unpack, s](const std::vector<mx::array>& a) {
    const Call c = unpack(a);
    return std::vector<mx::array>{mx::fast::scaled_dot_product_attention(c.q, c.k, c.v, c.scale,
                                                                         c.causal ? "causal"
                                                                         : c.mask ? "array"
                                                                                  : "",
                                                                         c.mask, c.sinks, false, s)};
  };
  using Arrays = std::vector<mx::array>;
  const auto function =
      mx::custom_function([unpack, plan, s](const Arrays& a) { return Arrays{launch(plan, unpack(a), s).first}; },
                          [by_mlx](const Arrays& primals, const Arrays& cotangents, const Arrays& /*outputs*/) {
                            return mx::vjp(by_mlx, primals, cotangents).second;
                          });
  return function(arrays)[0];
}

std::string why_not_served(const mx::array& queries, const mx::array& keys, const mx::array& values,
                           const std::string& mask_mode, const std::optional<mx::array>& mask_arr,
                           const std::optional<mx::array>& sinks, mx::StreamOrDevice s) {
  const mx::Dtype dtype = check_tensors(queries, keys, values);
  check_mask(queries, keys, mask_mode, mask_arr, dtype);
  check_sinks(queries, sinks, dtype);
  const Call call{queries, keys, values, mask_arr, sinks, 1.0F, mask_mode == "causal"};
  std::string reason = why_not_served(call, dtype, s);
  if (!reason.empty()) return reason;
  try {
    (void)plan_of(call, this_gpu());
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

mx::array scaled_dot_product_attention(const mx::array& queries, const mx::array& keys, const mx::array& values,
                                       float scale, const std::string& mask_mode,
                                       const std::optional<mx::array>& mask_arr, const std::optional<mx::array>& sinks,
                                       bool force_fused, mx::StreamOrDevice s) {
  if (!why_not_served(queries, keys, values, mask_mode, mask_arr, sinks, s).empty()) {
    return mx::fast::scaled_dot_product_attention(queries, keys, values, scale, mask_arr ? "array" : mask_mode,
                                                  mask_arr, sinks, force_fused, s);
  }
  const Call call{mx::astype(queries, keys.dtype(), s), keys, values, mask_arr, sinks, scale, mask_mode == "causal"};
  return attend(plan_of(call, this_gpu()), call, s);
}

}  // namespace kvonce::mlx
