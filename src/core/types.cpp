#include "kvonce/types.hpp"

namespace kvonce {

std::string_view to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
  }
  return "unknown";
}

std::string_view to_string(KvFormat format) noexcept {
  switch (format) {
    case KvFormat::f32:
      return "f32";
    case KvFormat::f16:
      return "f16";
    case KvFormat::bf16:
      return "bf16";
    case KvFormat::f8_e4m3:
      return "f8_e4m3";
    case KvFormat::mlx_int8:
      return "mlx_int8";
    case KvFormat::mlx_int4:
      return "mlx_int4";
    case KvFormat::q8_0:
      return "q8_0";
    case KvFormat::q4_0:
      return "q4_0";
  }
  return "unknown";
}

std::string_view to_string(MaskKind mask) noexcept {
  switch (mask) {
    case MaskKind::none:
      return "none";
    case MaskKind::boolean:
      return "boolean";
    case MaskKind::additive:
      return "additive";
    case MaskKind::tree:
      return "tree";
  }
  return "unknown";
}

std::string_view to_string(KvLayout layout) noexcept {
  switch (layout) {
    case KvLayout::strided:
      return "strided";
    case KvLayout::paged_nhd:
      return "paged_nhd";
    case KvLayout::paged_hnd:
      return "paged_hnd";
  }
  return "unknown";
}

std::string_view to_string(Backend backend) noexcept {
  switch (backend) {
    case Backend::cpu:
      return "cpu";
    case Backend::cuda:
      return "cuda";
    case Backend::metal:
      return "metal";
  }
  return "unknown";
}

std::int64_t format_bytes(KvFormat format, std::int64_t count) noexcept {
  constexpr std::int64_t kGgmlBlock = 32;
  switch (format) {
    case KvFormat::f32:
      return 4 * count;
    case KvFormat::f16:
    case KvFormat::bf16:
      return 2 * count;
    case KvFormat::f8_e4m3:
    case KvFormat::mlx_int8:
      return count;
    case KvFormat::mlx_int4:
      return (count + 1) / 2;
    case KvFormat::q8_0:
      return (count + kGgmlBlock - 1) / kGgmlBlock * 34;
    case KvFormat::q4_0:
      return (count + kGgmlBlock - 1) / kGgmlBlock * 18;
  }
  return 0;
}

std::string_view version() noexcept { return KVONCE_VERSION; }

}  // namespace kvonce
