// The whole public C++ API: make a Problem, make_plan it, attend with it.
#pragma once

#include "kvonce/attend.hpp"       // IWYU pragma: export
#include "kvonce/capture.hpp"      // IWYU pragma: export
#include "kvonce/plan.hpp"         // IWYU pragma: export
#include "kvonce/plan_cache.hpp"   // IWYU pragma: export
#include "kvonce/policy_file.hpp"  // IWYU pragma: export
#include "kvonce/problem.hpp"      // IWYU pragma: export
#include "kvonce/types.hpp"        // IWYU pragma: export
