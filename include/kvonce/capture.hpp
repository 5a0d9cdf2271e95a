// CUDA graphs: which capture a stream is in, and what has to live as long as its graphs. A workspace that a capture has
// used belongs to its graphs alone until they are destroyed: they may be replayed beside any other call.
#pragma once

#include <cstdint>

#include "kvonce/types.hpp"

namespace kvonce {

/// The number of the capture that `stream`, a cudaStream_t of CUDA device `ordinal`, takes part in: the same for all
/// its streams, and given once in a process. 0: none. Throws Error{Unavailable} in a build without CUDA.
KVONCE_API std::uint64_t cuda_capture_id(void* stream, int ordinal);

/// Calls release(object) once the graph that `stream` captures into, and all that was instantiated from it, have been
/// destroyed. It is called by a thread of the driver and must neither call CUDA nor wait for a thread that does.
/// Throws Error{InvalidArgument} when the stream is in no capture, otherwise as cuda_capture_id().
KVONCE_API void cuda_retain_in_capture(void* stream, int ordinal, void (*release)(void*), void* object);

}  // namespace kvonce
