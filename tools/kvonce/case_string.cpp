#include "kvonce/case_string.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>

#include "kvonce/safetensors.hpp"  // in_quotes

namespace kvonce::tool {
namespace {

constexpr std::array kFormats = {KvFormat::f32,      KvFormat::f16,      KvFormat::bf16, KvFormat::f8_e4m3,
                                 KvFormat::mlx_int8, KvFormat::mlx_int4, KvFormat::q8_0, KvFormat::q4_0};

constexpr std::string_view kGrammar =
    "32q/4kv d128 kv=32768 [q=1] [seqs=1] [dtype=bf16] [v_dtype=q8_0] [causal=1] [mask=additive] [softcap=30] "
    "[alibi=1] "
    "[sinks=1] [layout=nhd]";

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::InvalidArgument, fmt::format("case: {}", message));
}

std::string list_names() {
  std::string names;
  for (const KvFormat format : kFormats) {
    if (!names.empty()) names += ", ";
    names += to_string(format);
  }
  return names;
}

// The whole of `digits` as a number in [min, 2^31 - 1].
std::int64_t parse_count(std::string_view token, std::string_view digits, std::int64_t min) {
  constexpr std::int64_t kMax = 2147483647;
  std::int64_t value = 0;
  const char* end = digits.data() + digits.size();
  const auto [stop, error] = std::from_chars(digits.data(), end, value);
  if (digits.empty() || error != std::errc{} || stop != end || value < min || value > kMax) {
    refuse(fmt::format("token {} must hold an integer from {} to {}, got {}", in_quotes(token), min, kMax,
                       in_quotes(digits)));
  }
  return value;
}

void parse_heads(CaseSpec& spec, std::string_view token) {
  const auto slash = token.find('/');
  const std::string_view q_part = token.substr(0, slash);
  const std::string_view kv_part = token.substr(slash + 1);
  if (!q_part.ends_with('q') || !kv_part.ends_with("kv")) {
    refuse(fmt::format("token {} must be the heads, such as 32q/4kv", in_quotes(token)));
  }
  spec.num_q_heads = parse_count(token, q_part.substr(0, q_part.size() - 1), 1);
  spec.num_kv_heads = parse_count(token, kv_part.substr(0, kv_part.size() - 2), 1);
}

void parse_dims(CaseSpec& spec, std::string_view token) {
  const std::string_view dims = token.substr(1);
  const auto cross = dims.find('x');
  spec.head_dim_qk = parse_count(token, dims.substr(0, cross), 1);
  spec.head_dim_v = cross == std::string_view::npos ? spec.head_dim_qk : parse_count(token, dims.substr(cross + 1), 1);
}

bool parse_flag(std::string_view token, std::string_view value) {
  if (value != "0" && value != "1")
    refuse(fmt::format("token {} must be 0 or 1, got {}", in_quotes(token), in_quotes(value)));
  return value == "1";
}

KvFormat parse_dtype(std::string_view token, std::string_view value) {
  const std::optional<KvFormat> format = parse_format(value);
  if (!format)
    refuse(fmt::format("token {} must be one of {}, got {}", in_quotes(token), list_names(), in_quotes(value)));
  return *format;
}

MaskKind parse_mask(std::string_view token, std::string_view value) {
  for (const MaskKind mask : {MaskKind::none, MaskKind::boolean, MaskKind::additive, MaskKind::tree}) {
    if (kvonce::to_string(mask) == value) return mask;
  }
  refuse(
      fmt::format("token {} must be one of none, boolean, additive, tree, got {}", in_quotes(token), in_quotes(value)));
}

float parse_softcap(std::string_view token, std::string_view value) {
  float softcap = 0.0F;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, softcap);
  if (value.empty() || error != std::errc{} || stop != end || !(softcap >= 0.0F)) {
    refuse(fmt::format("token {} must hold a number from 0, got {}", in_quotes(token), in_quotes(value)));
  }
  return softcap;
}

// Each kind of token, as a bit of the set of those already seen.
enum TokenKind : unsigned {
  kHeads = 1,
  kDims = 2,
  kKvLen = 4,
  kQLen = 8,
  kSeqs = 16,
  kDtype = 32,
  kCausal = 64,
  kLayout = 128,
  kVDtype = 256,
  kMask = 512,
  kSoftcap = 1024,
  kAlibi = 2048,
  kSinks = 4096
};

TokenKind parse_token(CaseSpec& spec, std::string_view token) {
  if (token.find('/') != std::string_view::npos) {
    parse_heads(spec, token);
    return kHeads;
  }
  const auto equals = token.find('=');
  if (equals == std::string_view::npos) {
    if (!token.starts_with('d')) refuse(fmt::format("unknown token {}; allowed: {}", in_quotes(token), kGrammar));
    parse_dims(spec, token);
    return kDims;
  }
  const std::string_view key = token.substr(0, equals);
  const std::string_view value = token.substr(equals + 1);
  if (key == "kv") {
    spec.kv_len = parse_count(token, value, 0);
    return kKvLen;
  }
  if (key == "q") {
    spec.q_len = parse_count(token, value, 0);
    return kQLen;
  }
  if (key == "seqs") {
    spec.num_seqs = parse_count(token, value, 0);
    return kSeqs;
  }
  if (key == "dtype") {
    spec.dtype = parse_dtype(token, value);
    return kDtype;
  }
  if (key == "causal") {
    spec.causal = parse_flag(token, value);
    return kCausal;
  }
  if (key == "v_dtype") {
    spec.v_dtype = parse_dtype(token, value);
    return kVDtype;
  }
  if (key == "mask") {
    spec.mask = parse_mask(token, value);
    return kMask;
  }
  if (key == "softcap") {
    spec.softcap = parse_softcap(token, value);
    return kSoftcap;
  }
  if (key == "alibi") {
    spec.alibi = parse_flag(token, value);
    return kAlibi;
  }
  if (key == "sinks") {
    spec.sinks = parse_flag(token, value);
    return kSinks;
  }
  if (key == "layout") {
    if (value != "hnd" && value != "nhd") {
      refuse(
          fmt::format("token {} must be hnd (heads, tokens, dims) or nhd, got {}", in_quotes(token), in_quotes(value)));
    }
    spec.tokens_first = value == "nhd";
    return kLayout;
  }
  refuse(fmt::format("unknown token {}; allowed: {}", in_quotes(token), kGrammar));
}

}  // namespace

std::optional<KvFormat> parse_format(std::string_view name) {
  for (const KvFormat format : kFormats) {
    if (to_string(format) == name) return format;
  }
  return std::nullopt;
}

std::string format_names() { return list_names(); }

CaseSpec parse_case(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n";
  CaseSpec spec;
  unsigned seen = 0;
  for (std::size_t begin = text.find_first_not_of(kSpaces); begin != std::string_view::npos;) {
    const std::size_t end = std::min(text.find_first_of(kSpaces, begin), text.size());
    const std::string_view token = text.substr(begin, end - begin);
    const TokenKind kind = parse_token(spec, token);
    if ((seen & kind) != 0) refuse(fmt::format("token {} repeats one given before", in_quotes(token)));
    seen |= kind;
    begin = text.find_first_not_of(kSpaces, end);
  }
  constexpr unsigned kRequired = kHeads | kDims | kKvLen;
  if ((seen & kRequired) != kRequired) {
    const std::string_view missing = (seen & kHeads) == 0  ? "heads, such as 32q/4kv"
                                     : (seen & kDims) == 0 ? "head dim, such as d128"
                                                           : "KV length, such as kv=32768";
    refuse(fmt::format("{} lacks the {}; a case is: {}", in_quotes(text), missing, kGrammar));
  }
  return spec;
}

std::string to_string(const CaseSpec& spec) {
  std::string text = fmt::format("{}q/{}kv d{}", spec.num_q_heads, spec.num_kv_heads, spec.head_dim_qk);
  if (spec.head_dim_v != spec.head_dim_qk) text += fmt::format("x{}", spec.head_dim_v);
  text += fmt::format(" kv={} q={} seqs={}", spec.kv_len, spec.q_len, spec.num_seqs);
  if (spec.dtype) text += fmt::format(" dtype={}", kvonce::to_string(*spec.dtype));
  if (spec.v_dtype) text += fmt::format(" v_dtype={}", kvonce::to_string(*spec.v_dtype));
  if (!spec.causal) text += " causal=0";
  if (spec.mask != MaskKind::none) text += fmt::format(" mask={}", kvonce::to_string(spec.mask));
  if (spec.softcap > 0.0F) text += fmt::format(" softcap={}", spec.softcap);
  if (spec.alibi) text += " alibi=1";
  if (spec.sinks) text += " sinks=1";
  if (spec.tokens_first) text += " layout=nhd";
  return text;
}

DType default_q_dtype(KvFormat format) {
  switch (format) {
    case KvFormat::f32:
      return DType::f32;
    case KvFormat::bf16:
      return DType::bf16;
    default:
      return DType::f16;
  }
}

Problem to_problem(const CaseSpec& spec, KvFormat default_format, DType q_dtype) {
  Problem problem;
  problem.num_seqs = spec.num_seqs;
  problem.q_len = spec.q_len;
  problem.num_q_heads = spec.num_q_heads;
  problem.num_kv_heads = spec.num_kv_heads;
  problem.head_dim_qk = spec.head_dim_qk;
  problem.head_dim_v = spec.head_dim_v;
  problem.max_kv_len = spec.kv_len;
  problem.q_dtype = q_dtype;
  problem.out_dtype = q_dtype;
  problem.k_format = spec.dtype.value_or(default_format);
  problem.v_format = spec.v_dtype.value_or(problem.k_format);
  const auto is_mlx = [](KvFormat format) { return format == KvFormat::mlx_int8 || format == KvFormat::mlx_int4; };
  if (is_mlx(problem.k_format) || is_mlx(problem.v_format)) {
    problem.quant_group = 64;  // what mlx-lm takes
    problem.scales_dtype = DType::f16;
  }
  problem.causal = spec.causal;
  problem.mask = spec.mask;
  if (spec.mask == MaskKind::additive) problem.mask_dtype = DType::f16;
  problem.softcap = spec.softcap;
  problem.has_alibi = spec.alibi;
  problem.has_sinks = spec.sinks;
  return problem;
}

}  // namespace kvonce::tool
