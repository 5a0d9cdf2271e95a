// attend allocates nothing: operator new is counted in every build, malloc and its relatives where no sanitizer owns them.
#include <atomic>
#include <cstdlib>
#include <new>

#include "target_test.hpp"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVONCE_COUNT_MALLOC 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KVONCE_COUNT_MALLOC 0
#endif
#endif
#if !defined(KVONCE_COUNT_MALLOC) && defined(__GLIBC__)
#define KVONCE_COUNT_MALLOC 1
#endif

namespace {

std::atomic<bool> g_counting{false};
std::atomic<int> g_count{0};

void count() {
  if (g_counting.load(std::memory_order_relaxed)) g_count.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

#if KVONCE_COUNT_MALLOC
#pragma GCC visibility push(default)  // else only this file calls them, not libstdc++'s operator new
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
  count();
  return __libc_malloc(bytes);
}
void* calloc(std::size_t num, std::size_t bytes) {
  count();
  return __libc_calloc(num, bytes);
}
void* realloc(void* old, std::size_t bytes) {
  count();
  return __libc_realloc(old, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
}
#pragma GCC visibility pop
#else
void* operator new(std::size_t bytes) {
  count();
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace kvonce::conformance {
namespace {

class AllocationTest : public TargetTest {};

TEST_P(AllocationTest, AttendAllocatesNothing) {
  for (const KvFormat format : kPlainFormats) {
    for (const std::int64_t dim : {64, 40}) {
      for (const std::int64_t q_len : {1, 5}) {
        CaseSpec spec = typical(q_len, format, dim);
        spec.problem.window = q_len == 5 ? 50 : 0;
        spec.num_threads = 2;
        spec.options.chunk_tokens = 32;
        const Plan plan = plan_case(spec, device());
        CaseTensors tensors(spec);
        std::vector<unsigned char> workspace(plan.workspace_bytes());
        // The first call may start the threads of the pool.
        attend(plan, tensors.inputs(), tensors.outputs(), workspace.data(), workspace.size());
        g_count = 0;
        g_counting = true;
        for (int repeat = 0; repeat < 20; ++repeat) {
          attend(plan, tensors.inputs(), tensors.outputs(), workspace.data(), workspace.size());
        }
        g_counting = false;
        EXPECT_EQ(g_count.load(), 0) << spec.name;
      }
    }
  }
}

TEST_P(AllocationTest, TheCounterCounts) {
  g_count = 0;
  g_counting = true;
  char* byte = new char;
  const std::vector<int> values(1000, 1);
  // Compilers may leave out an allocation that nobody else sees.
  asm volatile("" : : "r"(byte), "r"(values.data()) : "memory");
  delete byte;
  g_counting = false;
  EXPECT_EQ(g_count.load(), 2);
}

KVONCE_ON_EVERY_TARGET(AllocationTest);

}  // namespace
}  // namespace kvonce::conformance
