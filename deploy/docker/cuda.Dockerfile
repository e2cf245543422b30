# A server for NVIDIA GPUs, with torch and the GPU kernels built in: it runs checkpoints as they come.
#   docker build -f deploy/docker/cuda.Dockerfile -t toolkit:cuda .
#   docker run --rm --gpus all -p 23333:23333 -v "$PWD/model:/model:ro" toolkit:cuda
# --build-arg CUDA_VERSION=cu12 for a driver that knows CUDA 12 alone, cu13 for one of 580 or later. CUDA 11 has no torch
# that is new enough.
ARG CUDA_VERSION=cu13
FROM nvidia/cuda:12.8.1-devel-ubuntu22.04 AS cu12
FROM nvidia/cuda:13.0.1-devel-ubuntu22.04 AS cu13

# hadolint ignore=DL3006
FROM ${CUDA_VERSION} AS tools
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git software-properties-common \
    && add-apt-repository --yes ppa:deadsnakes/ppa \
    && apt-get install -y --no-install-recommends python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src

FROM tools AS build
COPY . .
# What `tool --version` says: --build-arg TOOLKIT_COMMIT="$(git rev-parse --short=10 HEAD)"
ARG TOOLKIT_COMMIT
RUN PYTHON=python3.12 bash scripts/wheel/build_wheel

FROM python:3.12-slim-bookworm
ARG CUDA_VERSION
# More of the package's extras, separated by commas.
ARG EXTRAS=torch
# Triton compiles its launchers with a C compiler; torch brings the CUDA libraries, the host brings the driver.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# torch first, for CUDA 12 the newest of its index, with what it pins itself; then what else the extras need by
# requirements/lock.txt, then the package.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/src,target=/src \
    if [ "$CUDA_VERSION" = cu12 ]; then \
        pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cu126 --extra-index-url https://pypi.org/simple torch; \
    else pip install --no-cache-dir --requirement /src/requirements/torch.txt; fi \
    && python /src/scripts/locked.py "$EXTRAS" >/tmp/locked.txt \
    && pip install --no-cache-dir --require-hashes --no-deps --requirement /tmp/locked.txt \
    && pip install --no-cache-dir --no-deps /src/dist/toolkit-*.whl && pip check && rm /tmp/locked.txt \
    && useradd --create-home --uid 10001 toolkit \
    && install --directory --owner=toolkit --group=toolkit /home/toolkit/.cache /models
# A new volume takes its owner from the folder that it is mounted on: else it would be root's, and the user could not write.
USER 10001
# Triton keeps what it compiles where something may be written, also where the rest may only be read.
ENV TOOLKIT_HOME=/home/toolkit/.cache/toolkit TRITON_CACHE_DIR=/home/toolkit/.cache/triton PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 23333
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:23333/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tool"]
CMD ["serve", "api_server", "/model", "--server-name", "0.0.0.0", "--server-port", "23333"]
