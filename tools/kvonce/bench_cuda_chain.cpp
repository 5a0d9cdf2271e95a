#include "kvonce/bench_cuda_chain.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "baselines/cuda/status.hpp"

namespace kvonce::tool {
namespace {

using bench::cuda::NeighbourRows;
using bench::cuda::Produced;
using bench::cuda::require_success;

constexpr std::int64_t kCheckedSets = 8;

// The rows of the newest tokens, where `view` has them; `from` is left open.
NeighbourRows newest_rows(const TensorView& view, const Problem& problem, KvFormat format, std::int64_t dim) {
  const std::int64_t element = format_bytes(format, 1);
  NeighbourRows rows;
  rows.num_seqs = problem.num_seqs;
  rows.num_heads = problem.num_kv_heads;
  rows.num_tokens = std::min(problem.q_len, problem.max_kv_len);
  rows.row_bytes = dim * element;
  rows.seq_stride = view.seq_stride * element;
  rows.head_stride = view.head_stride * element;
  rows.token_stride = view.token_stride * element;
  // The set is the benchmark's own and not constant.
  rows.to =
      static_cast<char*>(const_cast<void*>(view.data)) + (problem.max_kv_len - rows.num_tokens) * rows.token_stride;
  return rows;
}

// Host memory: the rows without gaps.
std::vector<char> packed(const NeighbourRows& rows) {
  std::vector<char> bytes;
  for (std::int64_t seq = 0; seq < rows.num_seqs; ++seq) {
    for (std::int64_t head = 0; head < rows.num_heads; ++head) {
      for (std::int64_t token = 0; token < rows.num_tokens; ++token) {
        const char* const row = static_cast<const char*>(rows.to) + seq * rows.seq_stride + head * rows.head_stride +
                                token * rows.token_stride;
        bytes.insert(bytes.end(), row, row + rows.row_bytes);
      }
    }
  }
  return bytes;
}

void stage(DeviceMemory& memory, const void* data, std::size_t bytes) {
  memory.allocate(bytes);
  copy_to_device(memory.data(), data, bytes);
}

}  // namespace

std::string_view form_name(NeighbourForm form) {
  switch (form) {
    case NeighbourForm::plain:
      return "plain";
    case NeighbourForm::late:
      return "late";
    case NeighbourForm::early:
      break;
  }
  return "early";
}

ChainNeighbours::ChainNeighbours(const CudaCase& on_device, const CudaStream& stream)
    : on_device_(on_device), stream_(stream) {
  const CaseData& host = *on_device.host;
  const Problem& problem = host.problem;
  const Inputs inputs = host.inputs(0);
  const std::vector<char> k = packed(newest_rows(inputs.k, problem, problem.k_format, problem.head_dim_qk));
  const std::vector<char> v = packed(newest_rows(inputs.v, problem, problem.v_format, problem.dim_v()));
  stage(q_, host.q.data(), host.q.size());
  stage(k_rows_, k.data(), k.size());
  stage(v_rows_, v.data(), v.size());
  nan_.allocate(std::max({q_.bytes(), k_rows_.bytes(), v_rows_.bytes()}));
  consumed_.allocate(static_cast<std::size_t>(bench::cuda::kConsumedFloats) * sizeof(float));
  require_success(cudaMemsetAsync(nan_.data(), 0xff, nan_.bytes(), stream.get()), "clearing");
  require_success(cudaMemsetAsync(consumed_.data(), 0, consumed_.bytes(), stream.get()), "clearing");
  stream.wait();
}

Produced ChainNeighbours::produced(std::int64_t set) const {
  const Problem& problem = on_device_.host->problem;
  const Inputs inputs = on_device_.inputs(set);
  Produced produced;
  produced.q.to = on_device_.q.data();
  produced.q.from = q_.data();
  produced.q.row_bytes = static_cast<std::int64_t>(q_.bytes());
  produced.k = newest_rows(inputs.k, problem, problem.k_format, problem.head_dim_qk);
  produced.k.from = k_rows_.data();
  produced.v = newest_rows(inputs.v, problem, problem.v_format, problem.dim_v());
  produced.v.from = v_rows_.data();
  return produced;
}

void ChainNeighbours::produce(std::int64_t set, NeighbourForm form) const {
  const auto* const consumed = reinterpret_cast<const float*>(consumed_.data());
  require_success(run_produce(form, produced(set), consumed, stream_.get()), "producer");
}

void ChainNeighbours::consume(const CudaArm& attention, NeighbourForm form) const {
  auto* const consumed = reinterpret_cast<float*>(consumed_.data());
  require_success(run_consume(form, attention.out, attention.out_bytes, consumed, stream_.get()), "consumer");
}

CudaArm ChainNeighbours::around(const CudaArm& attention, NeighbourForm form) const {
  CudaArm chain;
  chain.label = attention.label;
  chain.label.name += fmt::format(" between {} neighbours", form_name(form));
  chain.enqueue = [this, attention, form](std::int64_t set) {
    produce(set, form);
    attention.enqueue(set);
    consume(attention, form);
  };
  chain.check = [this, attention, enqueue = chain.enqueue] { return check(attention, enqueue); };
  return chain;
}

CudaArm ChainNeighbours::without(const CudaArm& attention, NeighbourForm form) const {
  CudaArm chain;
  chain.label.name = fmt::format("{} neighbours", form_name(form));
  chain.enqueue = [this, attention, form](std::int64_t set) {
    produce(set, form);
    consume(attention, form);
  };
  return chain;
}

CudaFinding ChainNeighbours::check(const CudaArm& attention, const std::function<void(std::int64_t)>& enqueue) const {
  const auto* const consumed = reinterpret_cast<const float*>(consumed_.data());
  const std::int64_t num_sets = std::min(on_device_.host->num_sets, kCheckedSets);
  for (std::int64_t set = 0; set < num_sets; ++set) {
    Produced nothing = produced(set);
    for (NeighbourRows* const rows : {&nothing.q, &nothing.k, &nothing.v}) rows->from = nan_.data();
    require_success(run_produce(NeighbourForm::plain, nothing, consumed, stream_.get()), "producer");
  }
  require_success(cudaMemsetAsync(attention.out, 0xff, attention.out_bytes, stream_.get()), "clearing the result");
  // As a graph, so that the calls follow each other as closely as in what is timed. Set 0, which the oracle saw, is the last.
  const CudaGraph graph(stream_, [&] {
    for (std::int64_t set = num_sets; set-- > 0;) enqueue(set);
  });
  graph.launch(stream_);
  stream_.wait();

  CudaFinding finding = attention.judge_out();
  std::vector<std::byte> out(attention.out_bytes);
  copy_to_host(out.data(), attention.out, out.size());
  std::vector<float> got(static_cast<std::size_t>(bench::cuda::kConsumedFloats));
  copy_to_host(got.data(), consumed_.data(), consumed_.bytes());
  if (finding.wrong.empty() && got != bench::cuda::consumed_of(out)) {
    finding.wrong = "the consumer did not read the finished result";
  }
  return finding;
}

}  // namespace kvonce::tool
