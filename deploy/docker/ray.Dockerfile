# An image of ours with Ray Serve: the nodes of a cluster that `tool deploy DIR --to kuberay` describes.
#   docker build -f deploy/docker/cpu.Dockerfile -t toolkit:cpu .
#   docker build -f deploy/docker/ray.Dockerfile -t toolkit:cpu-ray .
#   docker build -f deploy/docker/ray.Dockerfile --build-arg BASE=toolkit:cuda -t toolkit:cuda-ray .
ARG BASE=toolkit:cpu
FROM ${BASE}
USER 0
RUN pip install --no-cache-dir "ray[serve]==2.60.0" && pip check
USER 10001
