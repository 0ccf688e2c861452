# SPDX-License-Identifier: Apache-2.0
# Espalier in a container (docs/installing.md). VARIANT is cpu, or cuda: with the CUDA kernels and CUDA's libraries.
FROM debian:12.12-slim AS build
ARG VARIANT=cpu
RUN case "$VARIANT" in cpu|cuda) ;; *) echo "VARIANT: expected cpu or cuda, received $VARIANT" >&2; exit 1 ;; esac
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /src

# What changes seldom comes first: system packages, LibTorch, and the Python that runs the command.
COPY requirements.txt ./
COPY scripts/setup.sh scripts/
RUN scripts/setup.sh && rm -rf /var/lib/apt/lists/* /root/.cache
RUN python3 -m venv /opt/espalier/python \
 && /opt/espalier/python/bin/python -m pip install --no-cache-dir --constraint requirements.txt \
      transformers jinja2 safetensors numpy zstandard
# The compiler of the CUDA release that this LibTorch comes with. It looks for libraries in lib64.
RUN if [ "$VARIANT" = cuda ]; then .venv/bin/python -m pip install --no-cache-dir --no-deps \
      nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
   && ln -s lib .venv/lib/python3.11/site-packages/nvidia/cu13/lib64; fi

# What is needed of LibTorch, in the places relative to each other where its libraries look. Its CPU half needs two of
# CUDA's small libraries, but no driver.
RUN cd .venv/lib/python3.11/site-packages \
 && mkdir -p /opt/espalier/torch/lib /opt/espalier/nvidia/cu13/lib \
 && cp torch/lib/libtorch_cpu.so torch/lib/libc10.so torch/lib/libgomp* /opt/espalier/torch/lib/ \
 && cp nvidia/cu13/lib/libcudart.so.13 nvidia/cu13/lib/libcupti.so.13 /opt/espalier/nvidia/cu13/lib/ \
 && if [ "$VARIANT" = cuda ]; then \
      cp torch/lib/libtorch_cuda*.so torch/lib/libc10_cuda.so torch/lib/libtorch_nvshmem.so torch/lib/libcaffe2_nvrtc.so \
         /opt/espalier/torch/lib/ \
   && for package in cu13 cudnn cusparselt nccl nvshmem; do \
        mkdir -p "/opt/espalier/nvidia/$package/lib" && cp nvidia/$package/lib/*.so* "/opt/espalier/nvidia/$package/lib/" \
     || exit 1; done; fi

# A compiler that reads LibTorch's headers takes up to 2 GB. JOBS is how many run at once.
COPY . .
ARG JOBS=
RUN if [ "$VARIANT" = cuda ]; then export CUDACXX=/src/.venv/lib/python3.11/site-packages/nvidia/cu13/bin/nvcc cuda=ON; fi \
 && cmake --preset release -DESPALIER_PYTHON=/src/.venv/bin/python -DESPALIER_TESTS=OFF -DESPALIER_BINDINGS=ON -DESPALIER_CUDA="${cuda:-OFF}" \
      -DESPALIER_TORCH_RPATH='$ORIGIN/../torch/lib;$ORIGIN/../../../../torch/lib' \
 && cmake --build build/release --parallel "${JOBS:-$(nproc)}" \
 && cmake --install build/release --prefix /opt/espalier --strip

FROM debian:12.12-slim
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libfmt9 libsimdjson14 libstdc++6 libxxhash0 libzstd1 python3 zlib1g \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 espalier && install --directory --owner espalier /work
COPY --from=build /opt/espalier/nvidia /opt/espalier/nvidia
COPY --from=build /opt/espalier/torch /opt/espalier/torch
COPY --from=build /opt/espalier/python /opt/espalier/python
COPY --from=build /opt/espalier/lib/libespalier_ops.so /opt/espalier/lib/
COPY --from=build /opt/espalier/share /opt/espalier/share
COPY --from=build /opt/espalier/bin /opt/espalier/bin
ENV PATH=/opt/espalier/bin:$PATH ESPALIER_PYTHON=/opt/espalier/python/bin/python
USER 1000
WORKDIR /work
ENTRYPOINT ["espalier"]
CMD ["--help"]
