// The `read` ceiling of `kvonce bench` as a C function that peers.py calls: the same loops on the same kind of pool.
#include <cstdint>

#include "baselines/baselines.hpp"

#define KVONCE_PEER extern "C" __attribute__((visibility("default")))

KVONCE_PEER int kvonce_peers_num_read_loops() { return static_cast<int>(kvonce::bench::kNumReadLoops); }

// The loop's name; null when the target is not built in.
KVONCE_PEER const char* kvonce_peers_read_loop_name(const char* target, int loop) {
  try {
    return kvonce::bench::target_kernels(target).read_loops.at(static_cast<std::size_t>(loop)).name;
  } catch (...) {
    return nullptr;
  }
}

// The xor of all 8-byte words of [data, data + bytes); data is 64-byte aligned. 0 also when the target is not built in.
KVONCE_PEER std::uint64_t kvonce_peers_read(const char* target, int loop, const void* data, std::int64_t bytes,
                                            int num_threads) {
  try {
    const auto& loops = kvonce::bench::target_kernels(target).read_loops;
    return kvonce::bench::run_read(loops.at(static_cast<std::size_t>(loop)), data, bytes, {num_threads});
  } catch (...) {
    return 0;
  }
}
