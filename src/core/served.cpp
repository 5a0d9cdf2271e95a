#include "core/served.hpp"

namespace kvonce::core {
namespace {

bool has_kernels(KvFormat format, [[maybe_unused]] bool blocks) {
#define KVONCE_FORMAT(name) \
  if (format == KvFormat::name) return true;
#define KVONCE_BLOCK_FORMAT(name) \
  if (blocks && format == KvFormat::name) return true;
#define KVONCE_AFFINE_FORMAT(name) KVONCE_BLOCK_FORMAT(name)
#include "shared/instances.def"
  return false;
}

}  // namespace

void require_served(bool served, Backend backend, const std::string& what, const std::string& instead) {
  if (served) return;
  throw Error(ErrorCode::Unsupported,
              what + " is not served by the " + std::string(to_string(backend)) + " backend yet; " + instead);
}

void require_plain_layout(const Problem& p, Backend backend) {
  require_served(p.layout == KvLayout::strided, backend, "layout " + std::string(to_string(p.layout)),
                 "gather the pages into a strided cache");
  require_served(!p.has_segments, backend, "has_segments", "attend to each segment with lse and merge the partials");
}

void require_listed_formats(const Problem& p, Backend backend, bool blocks) {
  const auto format = [backend, blocks](const char* name, KvFormat given) {
    require_served(has_kernels(given, blocks), backend, std::string(name) + " " + std::string(to_string(given)),
                   std::string("store the cache as f32, f16") +
                       (blocks ? ", bf16, q8_0, q4_0, mlx_int8 or mlx_int4" : " or bf16"));
  };
  format("k_format", p.k_format);
  format("v_format", p.v_format);
}

void require_plain_scores(const Problem& p, Backend backend) {
  const auto require = [backend](bool served, const std::string& what, const std::string& instead) {
    require_served(served, backend, what, instead);
  };
  require(p.mask == MaskKind::none, "mask " + std::string(to_string(p.mask)),
          "use causal, window, kv_lens and kv_starts where they say the same");
  require(p.softcap == 0.0F, "softcap", "leave it 0 and run layers with a softcap elsewhere");
  require(!p.has_alibi, "has_alibi", "leave it false and run layers with ALiBi elsewhere");
}

}  // namespace kvonce::core
