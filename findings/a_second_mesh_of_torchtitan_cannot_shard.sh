#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torchtitan 0.3.0, spmd_backend="spmd_types" (its default): in a process that has divided one model by FSDP2, a model over a second
# ParallelDims of the same ranks is refused, "Expected param's DTensor mesh to be the same mesh passed to fully_shard": a reference model
# or a second try in a notebook. One ParallelDims for both works, and so does spmd_backend="partial_dtensor".
#
# Debian 12, Python 3.11; torch 2.15.0, two processes on a CPU over Gloo; the debug model of llama3, one layer, on the meta device.
# Twice with partial_dtensor, then twice with spmd_types. Seen:
#   sharded, sharded, sharded, Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh objects
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 torchtitan==0.3.0

GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - "$folder/store" <<'PYTHON'
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims, utils
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

parallel_dims.device_type = "cpu"


def shard(backend):
    utils.set_spmd_backend(backend)
    parallelism = ParallelismConfig(data_parallel_shard_degree=2, spmd_backend=backend)
    dims = ParallelDims.from_config(parallelism, 2)
    dims.build_mesh()
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:1]
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = config.build()
    try:
        parallelize_llama(model, parallel_dims=dims, training=TrainingConfig(), parallelism=parallelism,
                          compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="")
    except ValueError as error:
        return str(error)
    return "sharded"


rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
found = [shard(backend) for backend in ("partial_dtensor", "partial_dtensor", "spmd_types", "spmd_types")]
if rank == 0:
    os.wait()
    print(found)
    sys.exit(not (found[:3] == ["sharded"] * 3 and "same mesh" in found[3]))
PYTHON
