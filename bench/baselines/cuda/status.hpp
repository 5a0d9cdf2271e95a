// CUDA return codes as errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "kvonce/types.hpp"

namespace kvonce::bench::cuda {

inline void require_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // the next call starts afresh
  throw Error(ErrorCode::Internal, std::string("cuda: ") + what + ": " + cudaGetErrorString(status));
}

}  // namespace kvonce::bench::cuda
