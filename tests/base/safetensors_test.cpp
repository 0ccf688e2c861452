// SPDX-License-Identifier: Apache-2.0
#include "espalier/base/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "espalier/base/check.h"
#include "espalier/base/rng.h"
#include "tests/base/message_of.h"
#include "tests/base/scratch_folder.h"
#include "tests/test_seed.h"

namespace espalier {
namespace {

using testing::message_of;
using testing::ScratchFolder;
using testing::test_seed;

// The tests write many small files, so they avoid the fsync that AtomicFile does for each.
void write_raw(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::string container(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + header + data;
}

template <typename T>
TensorView view(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
                const std::vector<T>& values) {
  return {name, dtype, std::move(shape), std::as_bytes(std::span(values))};
}

std::string bytes_of(const TensorView& tensor) {
  return {reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size()};
}

TEST(Safetensors, RoundTrip) {
  const ScratchFolder folder;
  const std::vector<float> floats{1, 2, 3, 4, 5, 6};
  const std::vector<uint8_t> bytes{7, 8, 9};
  const std::vector<int64_t> scalar{-5}, none;
  write_safetensors(folder / "a",
                    {view("f \"é\\", "F32", {2, 3}, floats), view("scalar", "I64", {}, scalar),
                     view("none", "I64", {4, 0}, none), view("bytes", "U8", {3}, bytes)},
                    {{"format", "pt"}});
  const SafetensorsFile file(folder / "a");
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.tensors()[0].name, "f \"é\\");
  EXPECT_EQ(file.at("f \"é\\").shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(file.tensors()[0].bytes.data(), floats.data(), 24), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.tensors()[0].bytes.data()) % 8, 0u);
  EXPECT_EQ(file.at("scalar").num_elements(), 1);
  EXPECT_EQ(file.at("none").num_elements(), 0);
  EXPECT_EQ(bytes_of(file.at("bytes")), "\7\10\11");
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_EQ(file.find("absent"), nullptr);
  const std::string message = message_of<InputError>([&] { file.at("absent"); });
  EXPECT_NE(message.find("tensor `absent` is missing"), std::string::npos) << message;
}

TEST(Safetensors, ViewsOutliveTheObjectWhileTheMappingIsHeld) {
  const ScratchFolder folder;
  const std::vector<uint8_t> bytes{1, 2, 3};
  write_safetensors(folder / "a", {view("x", "U8", {3}, bytes)});
  std::shared_ptr<const MappedFile> mapping;
  TensorView tensor;
  {
    const SafetensorsFile file(folder / "a");
    mapping = file.mapping();
    tensor = file.at("x");
  }
  EXPECT_EQ(bytes_of(tensor), "\1\2\3");
}

TEST(Safetensors, ReadsHeadersInAnyOrderAndWithUnknownFields) {
  const ScratchFolder folder;
  write_raw(folder / "a", container(R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3],"extra":{}},)"
                                    R"("a":{"shape":[1],"data_offsets":[0,1],"dtype":"U8"}}   )",
                                    "xyz"));
  const SafetensorsFile file(folder / "a");
  EXPECT_EQ(file.tensors()[0].name, "a");
  EXPECT_EQ(bytes_of(file.at("b")), "yz");
}

TEST(Safetensors, DtypeSizes) {
  EXPECT_EQ(dtype_bytes("BF16"), 2);
  EXPECT_EQ(dtype_bytes("F8_E4M3"), 1);
  EXPECT_EQ(dtype_bytes("F64"), 8);
  EXPECT_THROW(dtype_bytes("F128"), InputError);
}

struct Fault {
  const char* name;
  std::string bytes;
  const char* message;
};

std::vector<Fault> faults() {
  const auto tensor = [](const std::string& fields, const std::string& data = "abcd") {
    return container("{\"x\":{" + fields + "}}", data);
  };
  std::string huge_header(8, '\0'), long_header(8, '\0');
  const uint64_t huge = uint64_t{1} << 63, slightly_long = 3;
  std::memcpy(huge_header.data(), &huge, 8);
  std::memcpy(long_header.data(), &slightly_long, 8);
  return {
      {"empty file", "", "received only 0 bytes"},
      {"no whole length", "1234567", "received only 7 bytes"},
      {"huge header", huge_header + "{}", "at most 100000000"},
      {"header past the end", long_header + "{}", "truncated"},
      {"empty header", container("", ""), "must begin with"},
      {"leading blank", container(" {}", ""), "must begin with"},
      {"not JSON", container("{]", ""), "not JSON"},
      {"trailing text", container("{} x", ""), "not JSON"},
      {"invalid UTF-8", container("{\"\xff\":1}", ""), "not JSON"},
      {"deep nesting", container("{\"x\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}", ""),
       ""},
      {"tensor is a number", container("{\"x\":1}", ""), "expected an object"},
      {"duplicate tensor",
       container(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                 R"("x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                 "ab"),
       "duplicate name `x`"},
      {"duplicate by escape",
       container(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                 R"("\u0078":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                 "ab"),
       "duplicate name `x`"},
      {"duplicate field", tensor(R"("dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4])"),
       "duplicate field"},
      {"unknown dtype", tensor(R"("dtype":"Q4","shape":[4],"data_offsets":[0,4])"), "unknown dtype `Q4`"},
      {"dtype not text", tensor(R"("dtype":4,"shape":[4],"data_offsets":[0,4])"), "must be a string"},
      {"no dtype", tensor(R"("shape":[4],"data_offsets":[0,4])"), "`dtype` is missing"},
      {"no shape", tensor(R"("dtype":"U8","data_offsets":[0,4])"), "`shape` is missing"},
      {"no offsets", tensor(R"("dtype":"U8","shape":[4])"), "`data_offsets` is missing"},
      {"negative dimension", tensor(R"("dtype":"U8","shape":[-4],"data_offsets":[0,4])"), "integers >= 0"},
      {"two negative dimensions", tensor(R"("dtype":"U8","shape":[-2,-2],"data_offsets":[0,4])"),
       "integers >= 0"},
      {"float dimension", tensor(R"("dtype":"U8","shape":[4.0],"data_offsets":[0,4])"), "integers >= 0"},
      {"wrapped product", tensor(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])", ""),
       "too large"},
      {"wrapped bytes", tensor(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])", ""),
       "too large"},
      {"dimension above 64 bits",
       tensor(R"("dtype":"U8","shape":[18446744073709551620],"data_offsets":[0,4])"), ""},
      {"size differs", tensor(R"("dtype":"U16","shape":[4],"data_offsets":[0,4])"),
       "needs 8 bytes, received 4"},
      {"offsets descend", tensor(R"("dtype":"U8","shape":[4],"data_offsets":[4,0])"), "[begin, end]"},
      {"three offsets", tensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,4,4])"), "[begin, end]"},
      {"first offset not 0", tensor(R"("dtype":"U8","shape":[3],"data_offsets":[1,4])"), "expected 0"},
      {"truncated data", tensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,4])", "abc"), "truncated"},
      {"trailing data", tensor(R"("dtype":"U8","shape":[4],"data_offsets":[0,4])", "abcde"),
       "5 bytes of data"},
      {"data without tensors", container("{}", "a"), "1 bytes of data"},
      {"hole",
       container(R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                 R"("y":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
                 "abc"),
       "`y`: data_offsets begin at 2, expected 1"},
      {"overlap",
       container(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                 R"("y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
                 "abc"),
       "`y`: data_offsets begin at 1, expected 2"},
      {"metadata not an object", container(R"({"__metadata__":[]})", ""), "object of strings"},
      {"metadata not text", container(R"({"__metadata__":{"a":1}})", ""), "must be a string"},
      {"metadata twice", container(R"({"__metadata__":{},"__metadata__":{}})", ""), "duplicate name"},
      {"metadata key twice", container(R"({"__metadata__":{"a":"1","a":"2"}})", ""), "duplicate name"},
  };
}

TEST(Safetensors, RefusesEveryKindOfCorruption) {
  const ScratchFolder folder;
  for (const Fault& fault : faults()) {
    SCOPED_TRACE(fault.name);
    write_raw(folder / "broken", fault.bytes);
    const std::string message = message_of<InputError>([&] { SafetensorsFile(folder / "broken"); });
    EXPECT_NE(message.find("broken"), std::string::npos)
        << "no error, or without the file's name: " << message;
    EXPECT_NE(message.find(fault.message), std::string::npos) << message;
  }
  // Control: without a fault, the file that the cases above change is accepted.
  write_raw(folder / "good", container(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", "abcd"));
  EXPECT_NO_THROW(SafetensorsFile(folder / "good"));
}

TEST(Safetensors, EveryCutIsRefusedAndNoFlipCrashes) {
  const ScratchFolder folder;
  const std::vector<float> floats{1, 2, 3, 4, 5, 6};
  const std::vector<uint8_t> bytes{7, 8, 9};
  write_safetensors(folder / "good", {view("floats", "F32", {2, 3}, floats), view("bytes", "U8", {3}, bytes)},
                    {{"k", "v"}});
  const std::string good = read_text(folder / "good");
  for (size_t size = 0; size < good.size(); ++size) {
    write_raw(folder / "cut", good.substr(0, size));
    EXPECT_THROW(SafetensorsFile(folder / "cut"), InputError) << "cut to " << size << " bytes";
  }
  const uint64_t seed = 20240601;
  SCOPED_TRACE(fmt::format("seed {}", seed));
  Rng rng(test_seed(seed));
  const int64_t size = static_cast<int64_t>(good.size());
  int refused = 0;
  const int trials = 2000;
  for (int trial = 0; trial < trials; ++trial) {
    std::string bad = good;
    const int64_t flips = rng.between(1, 3);
    for (int64_t i = 0; i < flips; ++i) bad[rng.below(size)] = static_cast<char>(rng.below(256));
    write_raw(folder / "bad", bad);
    try {
      const SafetensorsFile file(folder / "bad");
      uint64_t total = 0;
      for (const TensorView& tensor : file.tensors()) {
        ASSERT_EQ(tensor.num_elements() * dtype_bytes(tensor.dtype),
                  static_cast<int64_t>(tensor.bytes.size()));
        total += tensor.bytes.size();
        for (const std::byte byte : tensor.bytes)
          total += static_cast<uint64_t>(byte) & 0;  // touches every byte
      }
      ASSERT_EQ(total, 27u);
    } catch (const InputError&) {
      ++refused;
    }
  }
  // Most flipped bits of the header are refused, and none of the data. Both must occur.
  EXPECT_GT(refused, trials / 10);
  EXPECT_LT(refused, trials);
}

TEST(Safetensors, WriterRefusesWhatWouldNotReadBack) {
  const ScratchFolder folder;
  const std::vector<uint8_t> bytes{7, 8, 9};
  const auto write = [&](std::vector<TensorView> tensors) { write_safetensors(folder / "a", tensors); };
  EXPECT_THROW(write({view("x", "U8", {2}, bytes)}), InputError);
  EXPECT_THROW(write({view("x", "U9", {3}, bytes)}), InputError);
  EXPECT_THROW(write({view("x", "U8", {3}, bytes), view("x", "U8", {3}, bytes)}), InputError);
  EXPECT_THROW(write({view("__metadata__", "U8", {3}, bytes)}), InputError);
  EXPECT_THROW(write({view("\xff", "U8", {3}, bytes)}), InputError);
  EXPECT_THROW(write({view("x", "U8", {-1, -3}, bytes)}), InputError);
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
  write({view("x", "U8", {3}, bytes)});
  EXPECT_EQ(SafetensorsFile(folder / "a").tensors().size(), 1u);
  write({});
  EXPECT_TRUE(SafetensorsFile(folder / "a").tensors().empty());
}

}  // namespace
}  // namespace espalier
