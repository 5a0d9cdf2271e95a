// replay FOLDER...: every file of the folders through the fuzz entry that this is linked with, as libFuzzer does when it
// is given files. A finding ends the process.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  int num_files = 0;
  for (int i = 1; i < argc; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
      std::printf("%s: %zu bytes\n", entry.path().c_str(), bytes.size());
      std::fflush(stdout);  // names the file that the entry does not return from
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
      ++num_files;
    }
  }
  std::printf("%d files\n", num_files);
  return num_files > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
