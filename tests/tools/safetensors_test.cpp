#include "kvonce/safetensors.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "kvonce/types.hpp"

namespace kvonce::tool {
namespace {

namespace fs = std::filesystem;

// A folder of its own for each test, gone afterwards.
class SafetensorsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "kvonce_safetensors_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  [[nodiscard]] std::string path(const char* name) const { return (folder_ / name).string(); }
  [[nodiscard]] std::size_t num_files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}));
  }

 private:
  fs::path folder_;
};

std::string refusal(std::string_view json, std::uint64_t data_bytes) {
  try {
    parse_header(json, data_bytes);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  ADD_FAILURE() << json << " was accepted";
  return "";
}

std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST_F(SafetensorsTest, ReadsBackWhatItWrites) {
  const float f[] = {1.5F, -2.0F, 3.25F};
  const std::int32_t i[] = {7};
  write_safetensors(path("a"),
                    {{"x", "F32", {1, 3}, std::as_bytes(std::span(f))},
                     {"empty", "F16", {0, 9}, {}},
                     {"n", "I32", {1}, std::as_bytes(std::span(i))}},
                    {{"note", "line\n\"quoted\""}});
  const SafetensorsFile file(path("a"));
  ASSERT_EQ(file.header().tensors.size(), 3U);
  EXPECT_EQ(file.header().metadata.at("note"), "line\n\"quoted\"");
  const TensorInfo* x = file.header().find("x");
  ASSERT_NE(x, nullptr);
  EXPECT_EQ(x->dtype, "F32");
  EXPECT_EQ(x->shape, (std::vector<std::uint64_t>{1, 3}));
  const AlignedBytes bytes = file.read(*x);
  ASSERT_EQ(bytes.size(), sizeof f);
  EXPECT_EQ(std::memcmp(bytes.data(), f, sizeof f), 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes.data()) % 64, 0U);
  EXPECT_EQ(file.read(*file.header().find("empty")).size(), 0U);
  EXPECT_EQ(file.header().find("absent"), nullptr);
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(SafetensorsTest, WriterReplacesAFileAndKeepsItOnFailure) {
  write_safetensors(path("a"), {}, {{"v", "1"}});
  write_safetensors(path("a"), {}, {{"v", "2"}});
  EXPECT_EQ(SafetensorsFile(path("a")).header().metadata.at("v"), "2");
  EXPECT_EQ(num_files(), 1U);
  EXPECT_THROW(write_safetensors(path("missing/a"), {}, {}), Error);
  EXPECT_EQ(num_files(), 1U);
}

TEST_F(SafetensorsTest, WriterRefusesWhatIsNotARegularFile) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_directory(path("folder"));
  EXPECT_THROW(write_safetensors(path("pipe"), {}, {}), Error);
  EXPECT_THROW(write_safetensors(path("folder"), {}, {}), Error);
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
  EXPECT_EQ(num_files(), 2U);
}

TEST_F(SafetensorsTest, WriterFollowsALink) {
  write_safetensors(path("a"), {}, {{"v", "1"}});
  fs::create_symlink("a", path("link"));
  write_safetensors(path("link"), {}, {{"v", "2"}});
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(SafetensorsFile(path("a")).header().metadata.at("v"), "2");
}

TEST_F(SafetensorsTest, ReaderRefusesWhatIsNotARegularFile) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THROW(SafetensorsFile{path("pipe")}, Error);
  EXPECT_THROW(SafetensorsFile{path("")}, Error);
  EXPECT_THROW(SafetensorsFile{path("absent")}, Error);
}

TEST_F(SafetensorsTest, ReaderNoticesThatAFileGotShorter) {
  const float f[4] = {};
  write_safetensors(path("a"), {{"x", "F32", {4}, std::as_bytes(std::span(f))}}, {});
  const SafetensorsFile file(path("a"));
  fs::resize_file(path("a"), fs::file_size(path("a")) - 1);
  EXPECT_THROW(static_cast<void>(file.read(file.header().tensors.front())), Error);
}

TEST_F(SafetensorsTest, EveryTruncationOfAFileIsRefused) {
  const float f[4] = {};
  write_safetensors(path("a"), {{"x", "F32", {4}, std::as_bytes(std::span(f))}}, {{"k", "v"}});
  const std::string whole = file_text(path("a"));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    fs::resize_file(path("a"), 0);
    std::ofstream(path("a"), std::ios::binary) << whole.substr(0, size);
    EXPECT_THROW(SafetensorsFile{path("a")}, Error) << size;
  }
}

TEST(SafetensorsHeaderTest, LengthIsCheckedAgainstTheFileAndTheCap) {
  const char three[8] = {3};
  EXPECT_EQ(parse_header_length(three, 11), 3U);
  EXPECT_THROW(parse_header_length(three, 10), Error);
  EXPECT_THROW(parse_header_length(std::span(three, 7), 7), Error);
  const char huge[8] = {0, 0, 0, 0, 0, 0, 0, 0x10};  // 2^60
  EXPECT_THROW(parse_header_length(huge, std::uint64_t{1} << 62), Error);
  const char all_ones[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
  EXPECT_THROW(parse_header_length(all_ones, ~std::uint64_t{0}), Error);
}

TEST(SafetensorsHeaderTest, AcceptsWhatTheFormatAllows) {
  EXPECT_TRUE(parse_header("{}", 0).tensors.empty());
  EXPECT_TRUE(parse_header("{\"__metadata__\":{}}   ", 0).tensors.empty());
  EXPECT_EQ(parse_header(R"({"s":{"dtype":"F64","shape":[],"data_offsets":[0,8]}})", 8).tensors[0].shape.size(), 0U);
  EXPECT_EQ(parse_header(R"({"s":{"data_offsets":[0,1],"shape":[2],"dtype":"F4"}})", 1).tensors.size(), 1U);
  // Any order in the header; no bytes at any place; zero-size shapes whatever the other axes.
  const auto header = parse_header(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},
      "e":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[1,1]},
      "a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}})",
                                   3);
  EXPECT_EQ(header.tensors.front().name, "a");
  EXPECT_EQ(header.tensors.size(), 3U);
}

TEST(SafetensorsHeaderTest, RefusesWhatTheFormatForbids) {
  const struct {
    const char* json;
    std::uint64_t data_bytes;
    const char* said;
  } cases[] = {
      {"", 0, "start with '{'"},
      {" {}", 0, "start with '{'"},
      {"[]", 0, "start with '{'"},
      {"{", 0, "not valid JSON"},
      {"{}}", 0, "not valid JSON"},
      {"{\"a\":1}", 0, "must be an object"},
      {"{\"a\":null}", 0, "must be an object"},
      {"{\"a\":[]}", 0, "must be an object"},
      {"{\"\xff\":{}}", 0, "not valid JSON"},
      {R"({"__metadata__":{"a":1}})", 0, "must be a string"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, "twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "twice"},
      {R"({"a":{}})", 0, "has no dtype"},
      {R"({"a":{"dtype":"U8","shape":[0]}})", 0, "has no data_offsets"},
      {R"({"a":{"dtype":"U8","data_offsets":[0,0]}})", 0, "has no shape"},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}})", 0, "twice"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1}})", 0, "unknown key"},
      {R"({"a":{"dtype":"U9","shape":[1],"data_offsets":[0,1]}})", 1, "'U9'"},
      {R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", 1, "dtype must be a string"},
      {R"({"a":{"dtype":"U8","shape":1,"data_offsets":[0,1]}})", 1, "shape must be an array"},
      {R"({"a":{"dtype":"U8","shape":"1","data_offsets":[0,1]}})", 1, "shape must be an array"},
      {R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1, "shape must be an array"},
      {R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1, "-1"},
      {R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", 1, "1.0"},
      {R"({"a":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}})", 1, "1e0"},
      {R"({"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,1]}})", 1, "18446744073709551616"},
      {R"({"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}})", 1, "true"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", 1, "must hold 2"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}})", 1, "must hold 2"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", 1, "must lie in"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 1, "must lie in"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1152921504606846976]}})", 1, "must lie in"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,3]}})", 3, "takes 4 bytes"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0, "2^61"},
      {R"({"a":{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}})", 0, "2^61"},
      {R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2, "whole bytes"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, "overlap"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "overlap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3, "gap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2, "gap"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 2, "cover all"},
      {"{}", 1, "cover all"},
      {R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
       0, "twice"},
  };
  for (const auto& wrong : cases) {
    EXPECT_NE(refusal(wrong.json, wrong.data_bytes).find(wrong.said), std::string::npos)
        << wrong.json << "\n  gave: " << refusal(wrong.json, wrong.data_bytes);
  }
}

TEST(SafetensorsHeaderTest, DeepNestingIsRefusedAtOnce) {
  std::string nested = "{\"a\":";
  nested.append(1'000'000, '[');
  EXPECT_NE(refusal(nested, 0).find("must be an object"), std::string::npos);
  std::string objects = "{\"a\":";
  for (int i = 0; i < 1000; ++i) objects += "{\"dtype\":";
  EXPECT_NE(refusal(objects, 0).find("dtype must be a string"), std::string::npos);
}

TEST(SafetensorsHeaderTest, QuotedTextStaysOnOneLineAndShort) {
  EXPECT_EQ(in_quotes("a\nb\x7f"), "'a\\x0ab\\x7f'");
  EXPECT_LT(in_quotes(std::string(10'000, 'x')).size(), 100U);
}

}  // namespace
}  // namespace kvonce::tool
