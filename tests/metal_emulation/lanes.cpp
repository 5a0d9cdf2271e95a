#include "lanes.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if !defined(__x86_64__)
#error "the stack switch below is written for x86-64"
#endif

// void kvonce_switch_stack(void** save, void* load): keeps the callee's registers on the old stack, goes on on the new one.
extern "C" void kvonce_switch_stack(void** save, void* load);
asm(R"(
.text
.globl kvonce_switch_stack
.type kvonce_switch_stack,@function
kvonce_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  retq
.size kvonce_switch_stack,.-kvonce_switch_stack
)");

namespace kvonce::emulation {
namespace {

constexpr std::size_t kStackBytes = 64 << 10;
constexpr std::size_t kPage = 4096;

struct Lane {
  void* stack_pointer = nullptr;
  bool done = false;
  Collective waits_for = Collective::none;
  int operand = 0;
  float in[6] = {};  // value, or a, b, d of a matrix product
  float out[2] = {};
};

// Stacks are kept for the next threadgroup; below each lies an unmapped page.
class Stacks {
 public:
  unsigned char* top(std::size_t i) {
    while (tops_.size() <= i) {
      void* mapping = mmap(nullptr, kStackBytes + kPage, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
      if (mapping == MAP_FAILED || mprotect(mapping, kPage, PROT_NONE) != 0) {
        std::fprintf(stderr, "no memory for the lanes' stacks\n");
        std::abort();
      }
      tops_.push_back(static_cast<unsigned char*>(mapping) + kPage + kStackBytes);
    }
    return tops_[i];
  }

 private:
  std::vector<unsigned char*> tops_;
};

struct Threadgroup {
  int num_simdgroups = 0;
  void (*body)(void*, int, int) = nullptr;
  void* context = nullptr;
  std::vector<Lane> lanes;
  void* scheduler = nullptr;
  int current = 0;
  std::uint64_t random = 0;
};

Threadgroup group;
Stacks stacks;
Counts executed;

std::uint64_t next_random() {
  group.random ^= group.random << 13;
  group.random ^= group.random >> 7;
  group.random ^= group.random << 17;
  return group.random;
}

const char* name_of(const Lane& lane) {
  if (lane.done) return "done";
  constexpr const char* kNames[] = {"none", "sum", "max", "shuffle", "shuffle_xor", "matrix_multiply_add", "barrier"};
  return kNames[static_cast<int>(lane.waits_for)];
}

[[noreturn]] void fail(const char* what, int simdgroup) {
  std::fprintf(stderr, "divergent collective: %s in simdgroup %d; its lanes wait for:", what, simdgroup);
  for (int i = 0; i < kLanesOfSimdgroup; ++i) {
    const Lane& lane = group.lanes[static_cast<std::size_t>(simdgroup * kLanesOfSimdgroup + i)];
    std::fprintf(stderr, " %s(%d)", name_of(lane), lane.operand);
  }
  std::fprintf(stderr, "\n");
  std::abort();
}

void wait_for(Collective operation, int operand) {
  Lane& lane = group.lanes[static_cast<std::size_t>(group.current)];
  lane.waits_for = operation;
  lane.operand = operand;
  kvonce_switch_stack(&lane.stack_pointer, group.scheduler);
}

[[noreturn]] void run_lane() {
  const int i = group.current;
  group.body(group.context, i / kLanesOfSimdgroup, i % kLanesOfSimdgroup);
  Lane& lane = group.lanes[static_cast<std::size_t>(i)];
  lane.done = true;
  lane.waits_for = Collective::none;
  kvonce_switch_stack(&lane.stack_pointer, group.scheduler);
  std::abort();
}

void multiply(Lane* lanes) {
  float a[8][8];
  float b[8][8];
  for (int i = 0; i < kLanesOfSimdgroup; ++i) {
    const int row = (i & 16) / 4 + (i & 6) / 2;
    const int column = (i & 8) / 2 + (i & 1) * 2;
    a[row][column] = lanes[i].in[0];
    a[row][column + 1] = lanes[i].in[1];
    b[row][column] = lanes[i].in[2];
    b[row][column + 1] = lanes[i].in[3];
  }
  for (int i = 0; i < kLanesOfSimdgroup; ++i) {
    const int row = (i & 16) / 4 + (i & 6) / 2;
    const int column = (i & 8) / 2 + (i & 1) * 2;
    for (int element = 0; element < 2; ++element) {
      float sum = lanes[i].in[4 + element];
      for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][column + element];
      lanes[i].out[element] = sum;
    }
  }
}

void resolve(int simdgroup) {
  Lane* lanes = &group.lanes[static_cast<std::size_t>(simdgroup * kLanesOfSimdgroup)];
  const Collective operation = lanes[0].waits_for;
  for (int i = 0; i < kLanesOfSimdgroup; ++i) {
    if (lanes[i].done || lanes[i].waits_for != operation) fail("different operations", simdgroup);
    if (operation == Collective::shuffle_xor && lanes[i].operand != lanes[0].operand) {
      fail("different masks", simdgroup);
    }
  }
  ++executed.collectives[static_cast<int>(operation)];
  if (operation == Collective::matrix_multiply_add) {
    multiply(lanes);
  } else {
    float values[kLanesOfSimdgroup];
    for (int i = 0; i < kLanesOfSimdgroup; ++i) values[i] = lanes[i].in[0];
    if (operation == Collective::sum || operation == Collective::max) {
      for (int distance = kLanesOfSimdgroup / 2; distance > 0; distance /= 2) {
        for (int i = 0; i < distance; ++i) {
          const float other = values[i + distance];
          values[i] = operation == Collective::sum ? values[i] + other : __builtin_fmaxf(values[i], other);
        }
      }
      for (int i = 0; i < kLanesOfSimdgroup; ++i) lanes[i].out[0] = values[0];
    } else {
      for (int i = 0; i < kLanesOfSimdgroup; ++i) {
        const int from = operation == Collective::shuffle ? lanes[i].operand : i ^ lanes[i].operand;
        if (from < 0 || from >= kLanesOfSimdgroup) fail("no such lane", simdgroup);
        lanes[i].out[0] = values[from];
      }
    }
  }
  for (int i = 0; i < kLanesOfSimdgroup; ++i) lanes[i].waits_for = Collective::none;
}

// Runs the lanes of a simdgroup until each waits or is done.
void run_simdgroup(int simdgroup) {
  int order[kLanesOfSimdgroup];
  for (int i = 0; i < kLanesOfSimdgroup; ++i) order[i] = i;
  for (int i = kLanesOfSimdgroup - 1; i > 0; --i) {
    std::swap(order[i], order[next_random() % static_cast<std::uint64_t>(i + 1)]);
  }
  for (const int i : order) {
    group.current = simdgroup * kLanesOfSimdgroup + i;
    Lane& lane = group.lanes[static_cast<std::size_t>(group.current)];
    if (!lane.done) kvonce_switch_stack(&group.scheduler, lane.stack_pointer);
  }
}

enum class State : std::uint8_t { ready, at_barrier, done };

State state_of(int simdgroup) {
  const Lane* lanes = &group.lanes[static_cast<std::size_t>(simdgroup * kLanesOfSimdgroup)];
  const bool done = lanes[0].done;
  const bool at_barrier = lanes[0].waits_for == Collective::barrier;
  for (int i = 0; i < kLanesOfSimdgroup; ++i) {
    if (lanes[i].done != done || (lanes[i].waits_for == Collective::barrier) != at_barrier) {
      fail("different operations", simdgroup);
    }
  }
  return done ? State::done : at_barrier ? State::at_barrier : State::ready;
}

}  // namespace

Counts& counts() { return executed; }
void reset_counts() { executed = {}; }

void run_threadgroup(int num_simdgroups, std::uint64_t seed, void (*body)(void*, int, int), void* context) {
  group.num_simdgroups = num_simdgroups;
  group.body = body;
  group.context = context;
  group.random = seed * 2654435761U + 88172645463325252U;
  group.lanes.assign(static_cast<std::size_t>(num_simdgroups * kLanesOfSimdgroup), {});
  for (std::size_t i = 0; i < group.lanes.size(); ++i) {
    // A return address and six registers; at run_lane's entry the stack is as after a call.
    auto** top = reinterpret_cast<void**>(stacks.top(i) - 72);
    std::memset(top - 8, 0, 8 * sizeof(void*));
    top[-1] = reinterpret_cast<void*>(&run_lane);
    top[0] = nullptr;
    group.lanes[i].stack_pointer = top - 7;
  }
  std::vector<int> ready(static_cast<std::size_t>(num_simdgroups));
  for (int i = 0; i < num_simdgroups; ++i) ready[static_cast<std::size_t>(i)] = i;
  std::vector<int> waiting;
  while (true) {
    while (!ready.empty()) {
      const std::size_t pick = next_random() % ready.size();
      const int simdgroup = ready[pick];
      run_simdgroup(simdgroup);
      const State state = state_of(simdgroup);
      if (state == State::ready) {
        resolve(simdgroup);
        continue;
      }
      ready[pick] = ready.back();
      ready.pop_back();
      if (state == State::at_barrier) waiting.push_back(simdgroup);
    }
    if (waiting.empty()) return;
    if (static_cast<int>(waiting.size()) != num_simdgroups)
      fail("a barrier that not every simdgroup reaches", waiting[0]);
    ++executed.collectives[static_cast<int>(Collective::barrier)];
    for (Lane& lane : group.lanes) lane.waits_for = Collective::none;
    ready.swap(waiting);
  }
}

float collective(Collective operation, float value, int operand) {
  Lane& lane = group.lanes[static_cast<std::size_t>(group.current)];
  lane.in[0] = value;
  wait_for(operation, operand);
  return lane.out[0];
}

void matrix_multiply_add(float (&d)[2], const float (&a)[2], const float (&b)[2]) {
  Lane& lane = group.lanes[static_cast<std::size_t>(group.current)];
  lane.in[0] = a[0], lane.in[1] = a[1], lane.in[2] = b[0], lane.in[3] = b[1], lane.in[4] = d[0], lane.in[5] = d[1];
  wait_for(Collective::matrix_multiply_add, 0);
  d[0] = lane.out[0];
  d[1] = lane.out[1];
}

void threadgroup_barrier() { wait_for(Collective::barrier, 0); }

}  // namespace kvonce::emulation
