// kvonce._core: what kvonce/__init__.py calls, which has the docstrings. Arguments are positional but for Plan.attend.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "merges.hpp"
#include "plans.hpp"

namespace kvonce::python {
namespace {

using Text = std::optional<std::string>;

constexpr const char* kPlanAttend = R"(Runs the plan. Shapes, units and errors as kvonce.attend.

    q: [num_seqs, num_q_heads, q_len, head_dim_qk] of the plan.
    k, v: [num_seqs, num_kv_heads, kv_len, ...], with kv_layout "BSHD" [num_seqs, kv_len, num_kv_heads, ...]; kv_len is
        anything up to max_kv_len, or more with kv_lens.
    Arrays are in the memory of the plan's device.

Threads may call this at once: each call has a workspace of its own, kept for later calls. On a CUDA device a stream has
one, and a graph that captures the call has one until it is destroyed; call once before the capture, so that the
workspace is made and prepared outside of the graph.)";

PyObject* exception_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::InvalidArgument:
      return PyExc_ValueError;
    case ErrorCode::Unsupported:
      return PyExc_NotImplementedError;
    default:
      return PyExc_RuntimeError;
  }
}

void require_4d(const Array& array, const char* name, const char* allowed) {
  if (array.shape.size() != 4) refuse(name, "shape " + shape_text(array.shape), allowed);
}

/// The options of kvonce.attend that are neither tensors nor choices.
struct AttendOptions {
  std::optional<float> scale;
  bool causal;
  std::optional<std::int64_t> window;
  float softcap;
  bool v_is_k_prefix;
  Text out_dtype;
  Text k_format;
  Text v_format;
};

/// The parts of a problem that say which score rules a call has.
void name_score_rules(const CallArguments& arguments, const Mask& mask, Problem& problem) {
  problem.has_sinks = !arguments.sinks.is_none();
  problem.has_alibi = !arguments.alibi_slopes.is_none();
  problem.has_mask_slopes = !arguments.mask_slopes.is_none();
  problem.mask = mask.kind;
  if (mask.kind == MaskKind::additive) problem.mask_dtype = mask.array.dtype;
}

nb::object attend(nb::handle q, nb::handle k, nb::handle v, const AttendOptions& options, const Choices& choices,
                  const CallArguments& arguments) {
  if (is_foreign_cuda(q)) {
    const auto on_tensors = [&](nb::handle q2, nb::handle k2, nb::handle v2, const CallArguments& given) {
      return attend(q2, k2, v2, options, choices, given);
    };
    return attend_through_torch(on_tensors, q, k, v, arguments);
  }
  const Array q_array = import_array(q, "q");
  const auto import_kv = [&](nb::handle object, const char* name, const Text& format, const char* argument) {
    Array array = format ? import_cache(object, name, parse_format(*format, argument)) : import_array(object, name);
    put_heads_first(array, arguments.tokens_first);
    return array;
  };
  const Text v_format = options.v_format ? options.v_format : options.k_format;
  const Array k_array = import_kv(k, "k", options.k_format, "k_format");
  const Array v_array = import_kv(v, "v", v_format, "v_format");
  require_4d(q_array, "q", "[num_seqs, num_q_heads, q_len, head_dim_qk]");
  require_4d(k_array, "k", "[num_seqs, num_kv_heads, kv_len, head_dim_qk]");
  require_4d(v_array, "v", "[num_seqs, num_kv_heads, kv_len, head_dim_v]");
  Problem problem;
  problem.num_seqs = q_array.shape[0];
  problem.q_len = q_array.shape[2];
  problem.num_q_heads = q_array.shape[1];
  problem.num_kv_heads = k_array.shape[1];
  problem.head_dim_qk = q_array.shape[3];
  problem.head_dim_v = v_array.shape[3];
  if (problem.head_dim_v == 0) refuse("v", "shape " + shape_text(v_array.shape), "a head_dim_v of at least 1");
  problem.max_kv_len = k_array.shape[2];
  problem.q_dtype = q_array.dtype;
  const auto format_of = [](const Array& array, const Text& format, const char* argument) {
    return format ? parse_format(*format, argument) : static_cast<KvFormat>(array.dtype);  // they agree in order
  };
  problem.k_format = format_of(k_array, options.k_format, "k_format");
  problem.v_format = format_of(v_array, v_format, "v_format");
  name_scales(arguments, problem);
  problem.out_dtype = q_array.dtype;
  if (options.out_dtype) {
    problem.out_dtype = parse_dtype(*options.out_dtype, "out_dtype");
  } else if (!arguments.out.is_none()) {
    problem.out_dtype = import_array(arguments.out, "out", true).dtype;
  }
  problem.scale = options.scale;
  problem.causal = options.causal;
  problem.window = options.window.value_or(0);
  problem.softcap = options.softcap;
  const Mask mask = import_mask(arguments.mask);
  name_score_rules(arguments, mask, problem);
  problem.v_is_k_prefix = options.v_is_k_prefix;
  const std::shared_ptr<BoundPlan> plan = find_plan(problem, q_array.place, choices);
  return plan->run(q, q_array, k_array, v_array, mask, arguments);
}

void bind_plan(nb::module_& module) {
  nb::class_<BoundPlan>(module, "Plan", nb::is_final(), "What will run, decided once. Made by kvonce.plan().")
      .def(
          "attend",
          [](BoundPlan& self, nb::handle q, nb::handle k, nb::handle v, nb::handle kv_lens, nb::handle kv_starts,
             nb::handle sinks, nb::handle out, bool return_lse, std::optional<std::uintptr_t> stream,
             nb::handle alibi_slopes, nb::handle mask, nb::handle mask_slopes, nb::handle k_scales, nb::handle k_biases,
             nb::handle v_scales, nb::handle v_biases, std::string_view kv_layout) {
            return self.attend(q, k, v,
                               {kv_lens, kv_starts, sinks, out, return_lse, stream, alibi_slopes, mask, mask_slopes,
                                k_scales, k_biases, v_scales, v_biases, parse_layout(kv_layout)});
          },
          nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::kw_only(), nb::arg("kv_lens") = nb::none(),
          nb::arg("kv_starts") = nb::none(), nb::arg("sinks") = nb::none(), nb::arg("out") = nb::none(),
          nb::arg("return_lse") = false, nb::arg("stream") = nb::none(), nb::arg("alibi_slopes") = nb::none(),
          nb::arg("mask") = nb::none(), nb::arg("mask_slopes") = nb::none(), nb::arg("k_scales") = nb::none(),
          nb::arg("k_biases") = nb::none(), nb::arg("v_scales") = nb::none(), nb::arg("v_biases") = nb::none(),
          nb::arg("kv_layout") = "BHSD", kPlanAttend)
      .def(
          "explain", [](const BoundPlan& self) { return self.plan().explain(); },
          "Several lines: kernel, read factor, chunks, workspace, predicted bytes and time, rejected kernels.")
      .def_prop_ro("kernel_id", [](const BoundPlan& self) { return self.plan().kernel_id(); })
      .def_prop_ro(
          "read_factor", [](const BoundPlan& self) { return self.plan().read_factor(); },
          "Times each KV byte is fetched from beyond a worker's private cache.")
      .def_prop_ro(
          "max_chunks", [](const BoundPlan& self) { return self.plan().max_chunks(); },
          "Token chunks of the longest sequence.")
      .def_prop_ro("workspace_bytes", [](const BoundPlan& self) { return self.plan().workspace_bytes(); })
      .def_prop_ro(
          "max_kv_bytes", [](const BoundPlan& self) { return self.plan().max_kv_bytes(); },
          "K and V bytes at max_kv_len, each counted once.")
      .def_prop_ro(
          "policy", [](const BoundPlan& self) { return to_string(self.plan().policy()); },
          "Every tunable as decided, as \"row_tile=4,...\".")
      .def_prop_ro(
          "device", [](const BoundPlan& self) { return to_string(self.place()); }, "\"cpu\", \"cuda:0\", ...")
      .def_prop_ro("target", [](const BoundPlan& self) { return self.plan().device().target; })
      .def_prop_ro("num_threads", [](const BoundPlan& self) { return self.plan().device().num_threads; })
      .def("__repr__",
           [](const BoundPlan& self) { return "<kvonce.Plan " + std::string(self.plan().kernel_id()) + ">"; });
}

void bind_device(nb::module_& module) {
  nb::class_<Device>(module, "Device", nb::is_final(),
                     "One way to run attention on this machine: a backend and its target.")
      .def_prop_ro(
          "backend", [](const Device& self) { return to_string(self.backend); }, "\"cpu\", \"cuda\" or \"metal\".")
      .def_ro("target", &Device::target, "CPU: the name that target= and KVONCE_CPU_TARGET take.")
      .def_ro("ordinal", &Device::ordinal, "CUDA: the device's number.")
      .def_ro("name", &Device::name, "The processor's own name.")
      .def_ro("unavailable", &Device::unavailable, "Empty when usable, else one sentence saying why not.")
      .def_ro("num_threads", &Device::num_threads, "Threads a plan may use.")
      .def("__repr__", [](const Device& self) {
        return "<kvonce.Device " + std::string(to_string(self.backend)) + " " + self.target +
               (self.unavailable.empty() ? "" : " (" + self.unavailable + ")") + ">";
      });
}

}  // namespace
}  // namespace kvonce::python

// NOLINTNEXTLINE(readability-*,bugprone-*,performance-*): the macro's own code
NB_MODULE(_core, module) {
  namespace nb = nanobind;
  using kvonce::python::Choices;
  using kvonce::python::Text;

  nb::set_leak_warnings(false);  // torch keeps an operator's functions, and what they hold, until the process ends
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const kvonce::Error& error) {
      PyErr_SetString(kvonce::python::exception_of(error.code()), error.what());
    }
  });
  nb::class_<Choices>(module, "Choices", nb::is_final())
      .def(
          "__init__",
          [](Choices* self, std::optional<std::int64_t> chunk_tokens, std::optional<int> threads, Text target,
             Text policy) {
            new (self) Choices{chunk_tokens, threads, std::move(target), std::move(policy)};
          },
          nb::arg("chunk_tokens").none(), nb::arg("threads").none(), nb::arg("target").none(),
          nb::arg("policy").none());
  kvonce::python::bind_plan(module);
  kvonce::python::bind_device(module);
  module.def("version", &kvonce::version);
  module.def("devices", &kvonce::devices);
  module.def("released_captures", &kvonce::python::released_captures);
  module.def(
      "attend",
      [](nb::handle q, nb::handle k, nb::handle v, std::optional<float> scale, bool causal,
         std::optional<std::int64_t> window, float softcap, nb::handle sinks, nb::handle kv_lens, nb::handle kv_starts,
         bool v_is_k_prefix, nb::handle out, const Text& out_dtype, bool return_lse,
         std::optional<std::uintptr_t> stream, const Choices& choices, nb::handle alibi_slopes, nb::handle mask,
         nb::handle mask_slopes, const Text& k_format, const Text& v_format, nb::handle k_scales, nb::handle k_biases,
         nb::handle v_scales, nb::handle v_biases, std::string_view kv_layout) {
        return kvonce::python::attend(
            q, k, v, {scale, causal, window, softcap, v_is_k_prefix, out_dtype, k_format, v_format}, choices,
            {kv_lens, kv_starts, sinks, out, return_lse, stream, alibi_slopes, mask, mask_slopes, k_scales, k_biases,
             v_scales, v_biases, kvonce::python::parse_layout(kv_layout)});
      },
      nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("scale"), nb::arg("causal"),
      nb::arg("window"), nb::arg("softcap"), nb::arg("sinks").none(), nb::arg("kv_lens").none(),
      nb::arg("kv_starts").none(), nb::arg("v_is_k_prefix"), nb::arg("out").none(), nb::arg("out_dtype"),
      nb::arg("return_lse"), nb::arg("stream"), nb::arg("choices"), nb::arg("alibi_slopes") = nb::none(),
      nb::arg("mask") = nb::none(), nb::arg("mask_slopes") = nb::none(), nb::arg("k_format") = nb::none(),
      nb::arg("v_format") = nb::none(), nb::arg("k_scales") = nb::none(), nb::arg("k_biases") = nb::none(),
      nb::arg("v_scales") = nb::none(), nb::arg("v_biases") = nb::none(), nb::arg("kv_layout") = "BHSD");
  module.def("merge", &kvonce::python::merge, nb::arg("outs").none(), nb::arg("lses").none());
  module.def(
      "plan",
      [](std::int64_t num_q_heads, std::int64_t num_kv_heads, std::int64_t head_dim_qk, std::int64_t max_kv_len,
         std::int64_t num_seqs, std::int64_t q_len, std::optional<std::int64_t> head_dim_v, const std::string& q_dtype,
         const Text& k_format, const Text& v_format, const Text& out_dtype, std::optional<float> scale, bool causal,
         std::optional<std::int64_t> window, float softcap, bool has_sinks, bool v_is_k_prefix,
         const std::string& device, const Choices& choices, bool has_alibi, const Text& mask, const Text& mask_dtype,
         bool has_mask_slopes, std::optional<std::int64_t> quant_group, const Text& scales_dtype) {
        kvonce::Problem problem;
        problem.num_seqs = num_seqs;
        problem.q_len = q_len;
        problem.num_q_heads = num_q_heads;
        problem.num_kv_heads = num_kv_heads;
        problem.head_dim_qk = head_dim_qk;
        problem.head_dim_v = head_dim_v.value_or(0);
        problem.max_kv_len = max_kv_len;
        problem.q_dtype = kvonce::python::parse_dtype(q_dtype, "q_dtype");
        problem.k_format = kvonce::python::parse_format(k_format.value_or(q_dtype), "k_format");
        problem.v_format = v_format ? kvonce::python::parse_format(*v_format, "v_format") : problem.k_format;
        problem.out_dtype = kvonce::python::parse_dtype(out_dtype.value_or(q_dtype), "out_dtype");
        problem.scale = scale;
        problem.causal = causal;
        problem.window = window.value_or(0);
        problem.softcap = softcap;
        problem.has_sinks = has_sinks;
        problem.v_is_k_prefix = v_is_k_prefix;
        problem.has_alibi = has_alibi;
        problem.has_mask_slopes = has_mask_slopes;
        problem.quant_group = quant_group.value_or(0);
        if (scales_dtype) problem.scales_dtype = kvonce::python::parse_dtype(*scales_dtype, "scales_dtype");
        if (mask) problem.mask = kvonce::python::parse_mask(*mask);
        if (mask_dtype) problem.mask_dtype = kvonce::python::parse_dtype(*mask_dtype, "mask_dtype");
        return kvonce::python::make_bound_plan(problem, kvonce::python::parse_place(device), choices);
      });
}
