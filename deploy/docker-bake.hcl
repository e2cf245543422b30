# All images with their tags:
#   VERSION=0.1.0 REGISTRY=registry.example/toolkit docker buildx bake -f deploy/docker-bake.hcl
# --push sends them, --print shows what would be made, and a name (cpu, cu12, cu13, internvl, qwen2vl) makes one alone.
variable "REGISTRY" { default = "toolkit" }
variable "VERSION" { default = "dev" }
variable "CUDA" { default = "cu13" }

group "default" { targets = ["cpu", "cu12", "cu13", "internvl", "qwen2vl"] }

target "cpu" {
  context = "."
  dockerfile = "deploy/docker/cpu.Dockerfile"
  tags = ["${REGISTRY}:latest-cpu", "${REGISTRY}:${VERSION}-cpu"]
}

target "cu12" {
  context = "."
  dockerfile = "deploy/docker/cuda.Dockerfile"
  args = { CUDA_VERSION = "cu12" }
  tags = ["${REGISTRY}:latest-cu12", "${REGISTRY}:${VERSION}-cu12"]
}

target "cu13" {
  context = "."
  dockerfile = "deploy/docker/cuda.Dockerfile"
  args = { CUDA_VERSION = "cu13" }
  tags = ["${REGISTRY}:latest", "${REGISTRY}:latest-cu13", "${REGISTRY}:${VERSION}-cu13"]
}

target "internvl" {
  context = "."
  dockerfile = "deploy/docker/InternVL_Dockerfile"
  args = { BASE = "base" }
  contexts = { base = "target:${CUDA}" }
  tags = ["${REGISTRY}:internvl", "${REGISTRY}:${VERSION}-internvl"]
}

target "qwen2vl" {
  context = "."
  dockerfile = "deploy/docker/Qwen2VL_Dockerfile"
  args = { BASE = "base" }
  contexts = { base = "target:${CUDA}" }
  tags = ["${REGISTRY}:qwen2vl", "${REGISTRY}:${VERSION}-qwen2vl"]
}
