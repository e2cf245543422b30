# Sourced by scripts/gpu_check and scripts/bench_gpu, in the root of the tree. Sets $python, and makes this tree the one
# that is imported as `toolkit`, installed or not.
unset TRITON_INTERPRET TRITON_DEFAULT_FP_FUSION # which are part of the key under which Triton keeps a kernel
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false
python="${PYTHON:-.venv/bin/python}"
[ -x "$(command -v "$python")" ] || python=python3
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
    echo "$0: $python has no torch; name one that has: PYTHON=/path/to/python $0" >&2
    exit 2
fi
for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr/local/cuda; do # nvcc and compute-sanitizer, which no path may name
    case ":$PATH:" in *":$folder/bin:"*) ;; *) [ ! -d "$folder/bin" ] || export PATH="$PATH:$folder/bin" ;; esac
done
# Not the root itself: transformers would take the folder `kernels` there for a package that it probes.
mkdir -p build/import
ln -sfn ../../toolkit build/import/toolkit
export PYTHONPATH="$PWD/build/import${PYTHONPATH:+:$PYTHONPATH}"
