// NaN and infinities in q, K and V reach what they must, nothing else, and never make a join wait: blocks wait for words of
// the workspace that differ from 0xffffffff, which is a NaN too.
#include <cmath>
#include <cstring>

#include "device_test.hpp"
#include "shared/token_range.h"

namespace kvonce::cuda_test {
namespace {

constexpr std::int64_t kGroup = 8;
constexpr std::int64_t kDim = 64;
constexpr std::int64_t kLen = 1000;

class SpecialValuesTest : public DeviceTest {
 protected:
  struct Bits {
    const char* name;
    std::uint32_t f32;
    std::uint16_t f16, bf16;
    bool is_nan;
  };
  static constexpr Bits kBits[] = {{"nan with every bit", 0xffffffffU, 0xffff, 0xffff, true},
                                   {"quiet nan", 0x7fc00000U, 0x7e00, 0x7fc0, true},
                                   {"signalling nan", 0x7f800001U, 0x7c01, 0x7f81, true},
                                   {"infinity", 0x7f800000U, 0x7c00, 0x7f80, false},
                                   {"-infinity", 0xff800000U, 0xfc00, 0xff80, false}};

  // Swaps one element of the device's tensor with the given bits.
  static void exchange(const DeviceCase& on_device, const TensorView& view, KvFormat format, std::int64_t head,
                       std::int64_t token, std::int64_t dim, unsigned char (&bits)[4]) {
    const std::size_t size = format == KvFormat::f32 ? 4 : 2;
    const std::int64_t at = head * view.head_stride + token * view.token_stride + dim;
    auto* const place = static_cast<unsigned char*>(const_cast<void*>(view.data)) + static_cast<std::size_t>(at) * size;
    unsigned char before[4] = {};
    conformance::wait_for_stream(on_device.stream(), "before an exchange");
    ASSERT_CUDA(cudaMemcpy(before, place, size, cudaMemcpyDeviceToHost));
    ASSERT_CUDA(put(on_device, place, bits, size));
    std::copy(before, before + 4, bits);
  }

  static void set_bits(const Bits& from, KvFormat format, unsigned char (&bits)[4]) {
    if (format == KvFormat::f32) std::memcpy(bits, &from.f32, 4);
    if (format == KvFormat::f16) std::memcpy(bits, &from.f16, 2);
    if (format == KvFormat::bf16) std::memcpy(bits, &from.bf16, 2);
  }

  // Calls body(spec, plan, tensors, on_device, clean) for each format and join; `clean`: what out is without special values.
  template <typename Body>
  static void for_each_kernel(Body body) {
    for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
      for (const JoinKind& join : join_kinds()) {
        CaseSpec spec = make_case(format, kDim, kGroup, 2, kLen);
        join.apply(spec);
        spec.name += std::string(" ") + join.name;
        const Plan plan = conformance::plan_case(spec, device());
        CaseTensors tensors(spec);
        DeviceCase on_device(plan, spec, tensors);
        on_device.prepare();
        on_device.attend();
        ASSERT_EQ(on_device.fetch(), "") << spec.name;
        ASSERT_EQ(judge_lengths(plan, spec, tensors, spec.kv_lens), "") << spec.name;
        std::vector<double> clean;
        for (std::int64_t head = 0; head < 2 * kGroup; ++head) {
          for (std::int64_t dim = 0; dim < kDim; ++dim) clean.push_back(tensors.out_value(0, head, 0, dim));
        }
        const std::vector<unsigned char> clean_bytes = tensors.result_bytes();
        body(spec, tensors, on_device, clean);
        if (HasFatalFailure()) return;
        // The workspace is as good as before.
        on_device.reset_outputs();
        on_device.attend();
        ASSERT_EQ(on_device.fetch(), "") << spec.name;
        ASSERT_EQ(tensors.result_bytes(), clean_bytes) << spec.name;
      }
    }
  }

  static void attend_again(DeviceCase& on_device) {
    on_device.reset_outputs();
    on_device.attend();
    ASSERT_EQ(on_device.fetch(), "");
  }
};

TEST_F(SpecialValuesTest, OneValueOfVSpoilsItsDimOfItsHeadsAlone) {
  for_each_kernel(
      [](const CaseSpec& spec, const CaseTensors& tensors, DeviceCase& on_device, const std::vector<double>& clean) {
        for (const Bits& special : kBits) {
          for (const std::int64_t token : {std::int64_t{0}, std::int64_t{333}, kLen - 1}) {
            constexpr std::int64_t kPlace = 37;
            unsigned char bits[4] = {};
            set_bits(special, spec.problem.v_format, bits);
            exchange(on_device, on_device.inputs().v, spec.problem.v_format, 1, token, kPlace, bits);
            ASSERT_NO_FATAL_FAILURE(attend_again(on_device)) << spec.name << ' ' << special.name;
            for (std::int64_t head = 0; head < 2 * kGroup; ++head) {
              for (std::int64_t dim = 0; dim < kDim; ++dim) {
                const double out = tensors.out_value(0, head, 0, dim);
                const std::string where = spec.name + ' ' + special.name + " token " + std::to_string(token) +
                                          " head " + std::to_string(head) + " dim " + std::to_string(dim);
                if (head >= kGroup && dim == kPlace) {
                  ASSERT_FALSE(std::isfinite(out)) << where;
                  ASSERT_TRUE(std::isnan(out) || !special.is_nan) << where;
                } else {
                  ASSERT_EQ(out, clean[static_cast<std::size_t>(head * kDim + dim)]) << where;
                }
              }
            }
            exchange(on_device, on_device.inputs().v, spec.problem.v_format, 1, token, kPlace, bits);
          }
        }
      });
}

TEST_F(SpecialValuesTest, OneValueOfKSpoilsItsHeadsAlone) {
  for_each_kernel(
      [](const CaseSpec& spec, const CaseTensors& tensors, DeviceCase& on_device, const std::vector<double>& clean) {
        for (const Bits& special : kBits) {
          for (const std::int64_t token : {std::int64_t{0}, std::int64_t{333}, kLen - 1}) {
            unsigned char bits[4] = {};
            set_bits(special, spec.problem.k_format, bits);
            exchange(on_device, on_device.inputs().k, spec.problem.k_format, 0, token, 5, bits);
            ASSERT_NO_FATAL_FAILURE(attend_again(on_device)) << spec.name << ' ' << special.name;
            for (std::int64_t head = 0; head < 2 * kGroup; ++head) {
              // An infinite score below leaves its row finite, one above leaves nothing.
              const double q = core::decode_value(spec.problem.k_format, tensors.inputs().q.data,
                                                  head * tensors.inputs().q.head_stride + 5);
              const bool negative = std::signbit(q) != (special.f32 >> 31 != 0);
              for (std::int64_t dim = 0; dim < kDim; ++dim) {
                const double out = tensors.out_value(0, head, 0, dim);
                const std::string where = spec.name + ' ' + special.name + " token " + std::to_string(token) +
                                          " head " + std::to_string(head) + " dim " + std::to_string(dim);
                if (head >= kGroup) {
                  ASSERT_EQ(out, clean[static_cast<std::size_t>(head * kDim + dim)]) << where;
                } else if (special.is_nan || !negative || q == 0.0) {
                  ASSERT_TRUE(std::isnan(out)) << where;
                } else {
                  ASSERT_TRUE(std::isfinite(out)) << where;
                }
              }
            }
            exchange(on_device, on_device.inputs().k, spec.problem.k_format, 0, token, 5, bits);
          }
        }
      });
}

TEST_F(SpecialValuesTest, OneValueOfQSpoilsItsRowAlone) {
  for_each_kernel(
      [](const CaseSpec& spec, const CaseTensors& tensors, DeviceCase& on_device, const std::vector<double>& clean) {
        for (const Bits& special : kBits) {
          if (!special.is_nan) continue;
          constexpr std::int64_t kHead = 11;
          unsigned char bits[4] = {};
          set_bits(special, spec.problem.k_format, bits);
          exchange(on_device, on_device.inputs().q, spec.problem.k_format, kHead, 0, 60, bits);
          ASSERT_NO_FATAL_FAILURE(attend_again(on_device)) << spec.name << ' ' << special.name;
          for (std::int64_t head = 0; head < 2 * kGroup; ++head) {
            for (std::int64_t dim = 0; dim < kDim; ++dim) {
              const double out = tensors.out_value(0, head, 0, dim);
              if (head == kHead) {
                ASSERT_TRUE(std::isnan(out)) << spec.name << ' ' << special.name << " dim " << dim;
              } else {
                ASSERT_EQ(out, clean[static_cast<std::size_t>(head * kDim + dim)]) << spec.name << " head " << head;
              }
            }
          }
          exchange(on_device, on_device.inputs().q, spec.problem.k_format, kHead, 0, 60, bits);
        }
      });
}

// 0 times a NaN is one: a row that causality or a window keeps from a token must not get it by that way.
TEST_F(SpecialValuesTest, AValueOfVStaysFromTheRowsThatDoNotSeeItsToken) {
  constexpr std::int64_t kQueries = 3;
  for (const KvFormat format : {KvFormat::f32, KvFormat::f16, KvFormat::bf16}) {
    for (const std::int64_t dim : {64, 80, 128}) {
      for (const std::int64_t group : {2, 5, 10}) {
        for (const std::int64_t window : {0, 20}) {
          for (const JoinKind& join : {join_kinds()[0], join_kinds()[2], join_kinds()[4]}) {
            CaseSpec spec = make_case(format, dim, group, 2, 131, kQueries);
            spec.problem.window = window;
            join.apply(spec);
            spec.name += std::string(" ") + join.name + " window " + std::to_string(window);
            const Plan plan = conformance::plan_case(spec, device());
            CaseTensors tensors(spec);
            DeviceCase on_device(plan, spec, tensors);
            on_device.prepare();
            on_device.attend();
            ASSERT_EQ(on_device.fetch(), "") << spec.name;
            const std::vector<unsigned char> clean = tensors.result_bytes();
            std::vector<double> clean_out;
            for (std::int64_t head = 0; head < 2 * group; ++head) {
              for (std::int64_t query = 0; query < kQueries; ++query) {
                clean_out.push_back(tensors.out_value(0, head, query, 37));
              }
            }
            for (const Bits& special : kBits) {
              for (const std::int64_t token : {109, 110, 111, 112, 127, 128, 129, 130}) {
                unsigned char bits[4] = {};
                set_bits(special, format, bits);
                exchange(on_device, on_device.inputs().v, format, 1, token, 37, bits);
                ASSERT_NO_FATAL_FAILURE(attend_again(on_device)) << spec.name << ' ' << special.name;
                for (std::int64_t head = 0; head < 2 * group; ++head) {
                  for (std::int64_t query = 0; query < kQueries; ++query) {
                    const auto range = shared::visible_range(query, kQueries, 131, 0, spec.problem.causal, window);
                    const bool sees = head >= group && token >= range.begin && token < range.end;
                    const double out = tensors.out_value(0, head, query, 37);
                    const std::string where = spec.name + ' ' + special.name + " token " + std::to_string(token) +
                                              " head " + std::to_string(head) + " query " + std::to_string(query);
                    ASSERT_EQ(std::isfinite(out), !sees) << where;
                    if (!sees) {
                      ASSERT_NEAR(out, clean_out[static_cast<std::size_t>(head * kQueries + query)], 1e-5) << where;
                    }
                  }
                }
                exchange(on_device, on_device.inputs().v, format, 1, token, 37, bits);
              }
            }
            attend_again(on_device);
            ASSERT_EQ(tensors.result_bytes(), clean) << spec.name;
          }
        }
      }
    }
  }
}

// All of K, V or q one NaN pattern: every word that the blocks exchange is a NaN.
TEST_F(SpecialValuesTest, NothingButNaN) {
  for_each_kernel(
      [](const CaseSpec& spec, const CaseTensors& tensors, DeviceCase& on_device, const std::vector<double>&) {
        for (const TensorView& view : {on_device.inputs().v, on_device.inputs().k, on_device.inputs().q}) {
          conformance::wait_for_stream(on_device.stream(), "before filling");
          const std::int64_t rows = view.data == on_device.inputs().q.data ? 2 * kGroup : 2 * kLen;
          const std::size_t bytes =
              static_cast<std::size_t>(rows * kDim) * (spec.problem.k_format == KvFormat::f32 ? 4 : 2);
          ASSERT_CUDA(cudaMemset(const_cast<void*>(view.data), 0xff, bytes));
          ASSERT_CUDA(cudaDeviceSynchronize());
          ASSERT_NO_FATAL_FAILURE(attend_again(on_device)) << spec.name;
          for (std::int64_t head = 0; head < 2 * kGroup; ++head) {
            for (std::int64_t dim = 0; dim < kDim; ++dim) {
              ASSERT_TRUE(std::isnan(tensors.out_value(0, head, 0, dim))) << spec.name << " head " << head;
            }
          }
          on_device.upload();
        }
      });
}
TEST_F(SpecialValuesTest, NothingButNaNForManyRows) {
  for (const std::int64_t group : {24, 60}) {
    for (const JoinKind& join : join_kinds()) {
      CaseSpec spec = make_case(KvFormat::bf16, 128, group, 2, kLen);
      join.apply(spec);
      spec.name += std::string(" ") + join.name;
      const Plan plan = conformance::plan_case(spec, device());
      CaseTensors tensors(spec);
      DeviceCase on_device(plan, spec, tensors);
      on_device.prepare();
      ASSERT_NO_FATAL_FAILURE(attend_again(on_device)) << spec.name;
      ASSERT_EQ(judge_lengths(plan, spec, tensors, spec.kv_lens), "") << spec.name;
      const std::vector<unsigned char> clean = tensors.result_bytes();
      ASSERT_CUDA(cudaMemset(const_cast<void*>(on_device.inputs().v.data), 0xff, 2 * kLen * 128 * 2));
      ASSERT_CUDA(cudaDeviceSynchronize());
      ASSERT_NO_FATAL_FAILURE(attend_again(on_device)) << spec.name;
      for (std::int64_t head = 0; head < 2 * group; ++head) {
        for (std::int64_t dim = 0; dim < 128; ++dim) {
          ASSERT_TRUE(std::isnan(tensors.out_value(0, head, 0, dim))) << spec.name << " head " << head;
        }
      }
      on_device.upload();
      ASSERT_NO_FATAL_FAILURE(attend_again(on_device)) << spec.name;
      ASSERT_EQ(tensors.result_bytes(), clean) << spec.name;
    }
  }
}

}  // namespace
}  // namespace kvonce::cuda_test
