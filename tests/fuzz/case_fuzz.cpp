// Fuzz entry of the case strings: whatever the text, parsing ends with an Error of one line or with a case that reads the
// same when it is printed, and that make_plan plans or refuses.
#include <cstdint>
#include <string_view>

#include "kvonce/case_string.hpp"
#include "kvonce/kvonce.hpp"
#include "require.hpp"

using kvonce::fuzz::require;
using kvonce::fuzz::require_message;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  kvonce::tool::CaseSpec spec;
  try {
    spec = kvonce::tool::parse_case(text);
  } catch (const kvonce::Error& error) {
    require(error.code() == kvonce::ErrorCode::InvalidArgument);
    require_message(error);
    return 0;
  }
  require(kvonce::tool::parse_case(kvonce::tool::to_string(spec)) == spec);
  static const kvonce::Device device = kvonce::default_device();
  try {
    const auto plan =
        kvonce::make_plan(kvonce::tool::to_problem(spec, kvonce::KvFormat::f16, kvonce::DType::f32), device);
    require(plan.problem().max_kv_len == spec.kv_len);
  } catch (const kvonce::Error& error) {
    require_message(error);
  }
  return 0;
}
