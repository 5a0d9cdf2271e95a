// The suite of inputs with known answers, on the emulated bodies: CMakeLists.txt renames what it calls (emulated_case.hpp).
#include "conformance/exact.cpp"  // NOLINT(bugprone-suspicious-include)
