#include "espalier/data/reader.h"

#include "espalier/data/jsonl_reader.h"
#include "espalier/data/packed.h"

namespace espalier {

Trajectories read_trajectories(const std::filesystem::path& path, const ReadOptions& options,
                               ReadReport* report) {
  if (path.extension() == ".safetensors") return read_packed(path, options, report);
  return read_jsonl(path, options, report);
}

}  // namespace espalier
