# A server for CPUs, without torch: it runs what `tool convert` wrote.
#   docker build -f deploy/docker/cpu.Dockerfile -t toolkit:cpu .
#   docker run --rm -p 23333:23333 -v "$PWD/work/demo-engine:/model:ro" toolkit:cpu
FROM debian:12-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# What `tool --version` says: --build-arg TOOLKIT_COMMIT="$(git rev-parse --short=10 HEAD)"
ARG TOOLKIT_COMMIT
RUN bash scripts/wheel/build_wheel

FROM python:3.12-slim-bookworm
# What it needs by requirements/lock.txt, then itself.
RUN --mount=type=bind,from=build,source=/src,target=/src \
    python /src/scripts/locked.py >/tmp/locked.txt \
    && pip install --no-cache-dir --require-hashes --no-deps --requirement /tmp/locked.txt \
    && pip install --no-cache-dir --no-deps /src/dist/toolkit-*.whl && pip check && rm /tmp/locked.txt \
    && useradd --create-home --uid 10001 toolkit \
    && install --directory --owner=toolkit --group=toolkit /home/toolkit/.cache /models
# A new volume takes its owner from the folder that it is mounted on: else it would be root's, and the user could not write.
USER 10001
ENV TOOLKIT_HOME=/home/toolkit/.cache/toolkit PYTHONUNBUFFERED=1
EXPOSE 23333
# start-period: what loading the model may take.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:23333/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tool"]
CMD ["serve", "api_server", "/model", "--server-name", "0.0.0.0", "--server-port", "23333"]
