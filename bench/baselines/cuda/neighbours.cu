// The producer and the consumer of a chain: see neighbours.hpp. Each is a few blocks that copy or read some kilobytes.
#include "baselines/cuda/neighbours.hpp"

#include <algorithm>
#include <cstring>

#include "kvonce/cuda.cuh"

namespace kvonce::bench::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 64;
constexpr std::uint32_t kConsumedMask = 0xffffff;  // what a float holds exactly, and never negative

template <NeighbourForm kForm>
__device__ __forceinline__ void begin_neighbour() {
  if constexpr (kForm == NeighbourForm::early) cuda_trigger_dependents();
  if constexpr (kForm != NeighbourForm::plain) cuda_wait_for_preceding();
}

__device__ __forceinline__ std::uint32_t xor_of(std::uint32_t word) { return word; }
__device__ __forceinline__ std::uint32_t xor_of(uint4 word) { return word.x ^ word.y ^ word.z ^ word.w; }
__device__ __forceinline__ void change(std::uint32_t& word, std::uint32_t bits) { word ^= bits; }
__device__ __forceinline__ void change(uint4& word, std::uint32_t bits) { word.x ^= bits; }

// Word `at` of the packed rows, to its place. `bits` is zero.
template <typename Word>
__device__ __forceinline__ void copy_word(const NeighbourRows& rows, std::uint32_t at, std::uint32_t bits) {
  const auto row_words = static_cast<std::uint32_t>(rows.row_bytes / static_cast<std::int64_t>(sizeof(Word)));
  const auto num_tokens = static_cast<std::uint32_t>(rows.num_tokens);
  const auto num_heads = static_cast<std::uint32_t>(rows.num_heads);
  const std::uint32_t row = at / row_words;
  const std::uint32_t head = row / num_tokens;
  char* const to = static_cast<char*>(rows.to) + head / num_heads * rows.seq_stride +
                   head % num_heads * rows.head_stride + row % num_tokens * rows.token_stride;
  Word word = static_cast<const Word*>(rows.from)[at];
  change(word, bits);
  reinterpret_cast<Word*>(to)[at % row_words] = word;
}

struct WordCounts {
  std::uint32_t q;
  std::uint32_t k;
  std::uint32_t v;
};

template <typename Word, NeighbourForm kForm>
__global__ void __launch_bounds__(kThreads) produce(Produced produced, WordCounts words, const float* consumed) {
  begin_neighbour<kForm>();
  std::uint32_t at = blockIdx.x * kThreads + threadIdx.x;
  // Never negative, which the compiler cannot know: what is written depends on what the consumer wrote.
  const std::uint32_t bits = consumed[at % kConsumedFloats] < 0.0F ? 1 : 0;
  for (; at < words.q + words.k + words.v; at += gridDim.x * kThreads) {
    if (at < words.q) {
      copy_word<Word>(produced.q, at, bits);
    } else if (at < words.q + words.k) {
      copy_word<Word>(produced.k, at - words.q, bits);
    } else {
      copy_word<Word>(produced.v, at - words.q - words.k, bits);
    }
  }
}

template <typename Word, NeighbourForm kForm>
__global__ void __launch_bounds__(kThreads) consume(const Word* out, std::int64_t words, float* consumed) {
  begin_neighbour<kForm>();
  const std::int64_t mine = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  std::uint32_t bits = 0;
  for (std::int64_t at = mine; at < words; at += kConsumedFloats) bits ^= xor_of(out[at]);
  consumed[mine] = static_cast<float>(bits & kConsumedMask);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(NeighbourForm form, std::int64_t blocks, cudaStream_t stream, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = form == NeighbourForm::plain ? 0 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

std::int64_t total_bytes(const NeighbourRows& rows) {
  return rows.row_bytes * rows.num_seqs * rows.num_heads * rows.num_tokens;
}

bool is_multiple(const NeighbourRows& rows, std::int64_t word) {
  const auto at = [](const void* pointer) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer));
  };
  return (at(rows.to) | at(rows.from) | rows.row_bytes | rows.seq_stride | rows.head_stride | rows.token_stride) %
             word ==
         0;
}

template <typename Word>
cudaError_t produce_words(NeighbourForm form, const Produced& produced, const float* consumed, cudaStream_t stream) {
  const auto words = [](const NeighbourRows& rows) {
    return static_cast<std::uint32_t>(total_bytes(rows) / static_cast<std::int64_t>(sizeof(Word)));
  };
  const WordCounts counts = {words(produced.q), words(produced.k), words(produced.v)};
  const std::int64_t all = std::int64_t{counts.q} + counts.k + counts.v;
  const std::int64_t blocks = std::clamp<std::int64_t>((all + kThreads - 1) / kThreads, 1, kMaxBlocks);
  auto* const kernel = form == NeighbourForm::plain  ? produce<Word, NeighbourForm::plain>
                       : form == NeighbourForm::late ? produce<Word, NeighbourForm::late>
                                                     : produce<Word, NeighbourForm::early>;
  return launch(form, blocks, stream, kernel, produced, counts, consumed);
}

template <typename Word>
cudaError_t consume_words(NeighbourForm form, const void* out, std::size_t out_bytes, float* consumed,
                          cudaStream_t stream) {
  auto* const kernel = form == NeighbourForm::plain  ? consume<Word, NeighbourForm::plain>
                       : form == NeighbourForm::late ? consume<Word, NeighbourForm::late>
                                                     : consume<Word, NeighbourForm::early>;
  return launch(form, kConsumedFloats / kThreads, stream, kernel, static_cast<const Word*>(out),
                static_cast<std::int64_t>(out_bytes / sizeof(Word)), consumed);
}

}  // namespace

cudaError_t run_produce(NeighbourForm form, const Produced& produced, const float* consumed, cudaStream_t stream) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 31;
  if (total_bytes(produced.q) + total_bytes(produced.k) + total_bytes(produced.v) > kMostBytes) {
    return cudaErrorInvalidValue;
  }
  const auto all = [&produced](std::int64_t word) {
    return is_multiple(produced.q, word) && is_multiple(produced.k, word) && is_multiple(produced.v, word);
  };
  if (all(16)) return produce_words<uint4>(form, produced, consumed, stream);
  if (all(4)) return produce_words<std::uint32_t>(form, produced, consumed, stream);
  return cudaErrorInvalidValue;
}

cudaError_t run_consume(NeighbourForm form, const void* out, std::size_t out_bytes, float* consumed,
                        cudaStream_t stream) {
  const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(out) | out_bytes;
  if (bits % 16 == 0) return consume_words<uint4>(form, out, out_bytes, consumed, stream);
  if (bits % 4 == 0) return consume_words<std::uint32_t>(form, out, out_bytes, consumed, stream);
  return cudaErrorInvalidValue;
}

std::vector<float> consumed_of(const std::vector<std::byte>& out) {
  std::vector<std::uint32_t> bits(static_cast<std::size_t>(kConsumedFloats));
  for (std::size_t at = 0; at + 4 <= out.size(); at += 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, out.data() + at, sizeof word);
    bits[at / 16 % bits.size()] ^= word;
  }
  std::vector<float> consumed;
  for (const std::uint32_t word : bits) consumed.push_back(static_cast<float>(word & kConsumedMask));
  return consumed;
}

}  // namespace kvonce::bench::cuda
