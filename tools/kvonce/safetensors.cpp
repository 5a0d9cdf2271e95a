#include "kvonce/safetensors.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>

#include "kvonce/types.hpp"

namespace kvonce::tool {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;  // bytes of one read or write call

[[noreturn]] void refuse(const std::string& path, const std::string& message) {
  throw Error(ErrorCode::InvalidArgument, fmt::format("{}: {}", in_quotes(path), message));
}

std::string system_error() { return std::strerror(errno); }

// A file under construction that disappears unless it is published.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string target) : target_(std::move(target)) {
    constexpr int kTries = 100;
    for (int i = 0; i < kTries && fd_ < 0; ++i) {
      path_ = fmt::format("{}.tmp{}.{}", target_, ::getpid(), i);
      fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ < 0 && errno != EEXIST) break;
    }
    if (fd_ < 0) refuse(target_, fmt::format("cannot be written: {}", system_error()));
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!published_) ::unlink(path_.c_str());
  }

  void write(const void* data, std::size_t num_bytes) {
    const char* next = static_cast<const char*>(data);
    while (num_bytes > 0) {
      const ssize_t written = ::write(fd_, next, std::min(num_bytes, kMaxTransfer));
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) refuse(target_, fmt::format("cannot be written: {}", system_error()));
      next += written;
      num_bytes -= static_cast<std::size_t>(written);
    }
  }

  void publish() {
    const int closed = ::close(fd_);
    fd_ = -1;
    if (closed != 0 || ::rename(path_.c_str(), target_.c_str()) != 0) {
      refuse(target_, fmt::format("cannot be written: {}", system_error()));
    }
    published_ = true;
  }

 private:
  std::string target_;
  std::string path_;
  int fd_ = -1;
  bool published_ = false;
};

// Where a rename has to go so that links keep pointing and devices stay what they are.
std::string resolve_target(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return path;
  if (!S_ISREG(status.st_mode)) refuse(path, "cannot be written: it is not a regular file");
  std::error_code error;
  const std::filesystem::path resolved = std::filesystem::canonical(path, error);
  return error ? path : resolved.string();
}

std::string header_json(const std::vector<TensorToWrite>& tensors, const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const TensorToWrite& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
  }
  std::string json = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  // Spaces after the JSON put the first tensor at a multiple of 8 bytes.
  json.append((8 - json.size() % 8) % 8, ' ');
  return json;
}

}  // namespace

AlignedBytes::AlignedBytes(std::size_t num_bytes)
    : data_(static_cast<std::byte*>(::operator new[](std::max<std::size_t>(num_bytes, 1), kAlignment))),
      size_(num_bytes) {}

void AlignedBytes::Free::operator()(std::byte* data) const noexcept { ::operator delete[](data, kAlignment); }

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: a pipe without a writer is refused below instead of being waited for.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd_ < 0) refuse(path_, fmt::format("cannot be opened: {}", system_error()));
  try {
    struct stat status {};
    if (::fstat(fd_, &status) != 0) refuse(path_, fmt::format("cannot be read: {}", system_error()));
    if (!S_ISREG(status.st_mode)) refuse(path_, "cannot be read: it is not a regular file");
    const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
    char length_bytes[8] = {};
    read_at(0, length_bytes, std::min<std::uint64_t>(sizeof length_bytes, file_bytes));
    const std::uint64_t header_bytes = parse_header_length(length_bytes, file_bytes);
    std::string json(header_bytes, '\0');
    read_at(sizeof length_bytes, json.data(), header_bytes);
    data_offset_ = sizeof length_bytes + header_bytes;
    header_ = parse_header(json, file_bytes - data_offset_);
  } catch (const Error& error) {
    ::close(fd_);
    const std::string message = error.what();
    if (message.starts_with(in_quotes(path_))) throw;
    refuse(path_, message);
  }
}

SafetensorsFile::~SafetensorsFile() { ::close(fd_); }

void SafetensorsFile::read_at(std::uint64_t offset, void* destination, std::uint64_t num_bytes) const {
  char* next = static_cast<char*>(destination);
  while (num_bytes > 0) {
    const ssize_t got =
        ::pread(fd_, next, std::min<std::uint64_t>(num_bytes, kMaxTransfer), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path_, fmt::format("cannot be read: {}", system_error()));
    if (got == 0) refuse(path_, fmt::format("ended at byte {} while it was being read", offset));
    next += got;
    offset += static_cast<std::uint64_t>(got);
    num_bytes -= static_cast<std::uint64_t>(got);
  }
}

AlignedBytes SafetensorsFile::read(const TensorInfo& tensor) const {
  AlignedBytes bytes(tensor.num_bytes());
  read_at(data_offset_ + tensor.begin, bytes.data(), tensor.num_bytes());
  return bytes;
}

void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string json = header_json(tensors, metadata);
  TemporaryFile file(resolve_target(path));
  unsigned char length[8];
  for (unsigned i = 0; i < sizeof length; ++i) length[i] = static_cast<unsigned char>(json.size() >> (8 * i));
  file.write(length, sizeof length);
  file.write(json.data(), json.size());
  for (const TensorToWrite& tensor : tensors) file.write(tensor.data.data(), tensor.data.size());
  file.publish();
}

}  // namespace kvonce::tool
