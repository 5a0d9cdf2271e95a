// Runs the fuzz entry over a corpus made here from a fixed seed: good files, then damaged copies of them.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Random = std::mt19937_64;  // its numbers are the same with every standard library

std::string file_of(const std::string& header, std::size_t data_bytes) {
  std::string file;
  for (unsigned i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i) & 0xff);
  return file + header + std::string(data_bytes, '\x3c');
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape, std::size_t begin,
                  std::size_t end) {
  return '"' + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

std::vector<std::string> good_files() {
  return {
      file_of("{}", 0),
      file_of("{\"__metadata__\":{\"a\":\"b\"}}  ", 0),
      file_of("{" + entry("q", "F32", "1,2,1,4", 0, 32) + "," + entry("k", "F16", "1,1,3,4", 32, 56) + "," +
                  entry("v", "F16", "1,1,3,4", 56, 80) + "," + entry("kv_lens", "I32", "1", 80, 84) + "}",
              84),
      file_of("{" + entry("b", "BF16", "3", 8, 14) + "," + entry("a", "F64", "", 0, 8) + "," +
                  entry("e", "F8_E4M3", "0,18446744073709551615", 8, 8) + "}",
              14),
  };
}

// Pieces that a random byte would seldom make.
constexpr std::array<const char*, 18> kPieces = {"{",
                                                 "}",
                                                 "[",
                                                 "]",
                                                 ",",
                                                 ":",
                                                 "\"",
                                                 "-1",
                                                 "1e9",
                                                 "18446744073709551615",
                                                 "18446744073709551616",
                                                 "1152921504606846976",
                                                 "null",
                                                 "\"q\"",
                                                 "\"dtype\"",
                                                 "\"shape\"",
                                                 "\"data_offsets\"",
                                                 "\\u0000"};

std::string damaged(std::string file, Random& random) {
  const std::size_t num_changes = 1 + random() % 4;
  for (std::size_t i = 0; i < num_changes && !file.empty(); ++i) {
    const std::size_t at = random() % file.size();
    switch (random() % 6) {
      case 0:
        file[at] = static_cast<char>(random() % 256);
        break;
      case 1:
        file[at] = static_cast<char>(file[at] ^ (1 << random() % 8));
        break;
      case 2:
        file.resize(at);
        break;
      case 3:
        file.erase(at, 1 + random() % 8);
        break;
      case 4:
        file.insert(at, kPieces[random() % kPieces.size()]);
        break;
      default:
        file.insert(at, file.substr(random() % file.size(), random() % 64));
        break;
    }
  }
  // Most of the time the length is made to fit again, so that damage reaches the JSON.
  if (file.size() >= 8 && random() % 4 != 0) {
    const std::size_t header_bytes = file.size() - 8 - random() % (file.size() - 7);
    for (unsigned i = 0; i < 8; ++i) file[i] = static_cast<char>(header_bytes >> (8 * i) & 0xff);
    const std::size_t end = file.rfind('}');
    if (end != std::string::npos && end >= 8) file[0] = static_cast<char>((end - 7) & 0xff);
  }
  return file;
}

int run(const std::string& file) {
  return LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(file.data()), file.size());
}

}  // namespace

int main() {
  constexpr int kFilesPerSeed = 25'000;
  Random random(20260101);
  int num_accepted = 0;
  int num_refused = 0;
  for (const std::string& good : good_files()) {
    if (run(good) != 0) {
      std::fprintf(stderr, "a good file was refused: %s\n", good.c_str() + 8);
      return EXIT_FAILURE;
    }
    for (int i = 0; i < kFilesPerSeed; ++i) ++(run(damaged(good, random)) == 0 ? num_accepted : num_refused);
  }
  std::printf("%d damaged files refused, %d still valid\n", num_refused, num_accepted);
  // A corpus that is nearly all refused, or hardly ever, would test one path only.
  return num_refused > kFilesPerSeed && num_accepted > 100 ? EXIT_SUCCESS : EXIT_FAILURE;
}
