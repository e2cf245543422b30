# A server for NVIDIA GPUs, with torch and the GPU kernels built in: it runs checkpoints as they come.
#   docker build -f deploy/docker/cuda.Dockerfile -t toolkit:cuda .
#   docker run --rm --gpus all -p 23333:23333 -v "$PWD/model:/model:ro" toolkit:cuda
FROM nvidia/cuda:12.8.1-devel-ubuntu22.04 AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ software-properties-common \
    && add-apt-repository --yes ppa:deadsnakes/ppa \
    && apt-get install -y --no-install-recommends python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN PYTHON=python3.12 bash scripts/build_wheel

FROM python:3.12-slim-bookworm
# Triton compiles its launchers with a C compiler; torch brings the CUDA libraries, the host brings the driver.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=build,source=/src/dist,target=/dist \
    pip install --no-cache-dir "$(echo /dist/toolkit-*.whl)[torch]" \
    && useradd --create-home --uid 10001 toolkit
USER 10001
ENV TOOLKIT_HOME=/home/toolkit/.cache/toolkit PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 23333
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:23333/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tool"]
CMD ["serve", "api_server", "/model", "--server-name", "0.0.0.0", "--server-port", "23333"]
