// SPDX-License-Identifier: Apache-2.0
// NCCL without a GPU: writes what it is called with to the file NCCL_STAND_IN_LOG. nccl.h checks the
// signatures.
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

std::string hex(const void* data, size_t size) {
  std::string text;
  for (size_t at = 0; at < size; ++at) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(data)[at]);
    text += digits;
  }
  return text;
}

ncclResult_t log(const std::string& line) {
  std::FILE* file = std::fopen(std::getenv("NCCL_STAND_IN_LOG"), "a");
  std::fprintf(file, "%s\n", line.c_str());
  std::fclose(file);
  return ncclSuccess;
}

std::string pointer(const void* value) {
  char text[32];
  std::snprintf(text, sizeof text, " %p", value);
  return text;
}

std::string buffers(const void* from, const void* to, size_t count, ncclDataType_t type) {
  const std::string name = type == ncclUint8 ? "uint8" : type == ncclFloat32 ? "float32" : "other";
  const size_t size = type == ncclFloat32 ? 4 : 1;
  return std::string(from == to ? " in place " : " ") + name + " x" + std::to_string(count) + ": " +
         hex(from, count * size);
}

}  // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  for (int at = 0; at < NCCL_UNIQUE_ID_BYTES; ++at) id->internal[at] = static_cast<char>(128 + at);
  return log("ncclGetUniqueId");
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  if (ranks < 0) return ncclInvalidUsage;
  *comm = reinterpret_cast<ncclComm_t>(0x77);
  return log("ncclCommInitRank " + std::to_string(ranks) + " " + hex(id.internal, sizeof id.internal) + " " +
             std::to_string(rank));
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  return log("ncclAllReduce" + buffers(from, to, count, type) + (operation == ncclSum ? " sum" : " other") +
             pointer(comm) + pointer(stream));
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return log("ncclBroadcast" + buffers(from, to, count, type) + " root " + std::to_string(root) +
             pointer(comm) + pointer(stream));
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return log("ncclCommAbort" + pointer(comm));
}

const char* ncclGetErrorString(ncclResult_t result) {
  static std::string text;
  text = "stand-in error " + std::to_string(result);
  return text.c_str();
}

}  // extern "C"
