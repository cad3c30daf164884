#!/bin/bash
# Run this checkout on a GPU host that has torch and no package index: a folder of packages takes the place of an environment.
#
#   without_index.sh part FILE N     keep one part of the packages' archive (tar, xz, cut into parts 0, 1, ...)
#   without_index.sh unpack          the parts become a folder, and the packages of this checkout importable beside it
#   without_index.sh run COMMAND...  run a command in that environment, in the root of this checkout
#   without_index.sh keep NAME       pack $OUT/NAME without its models and caches as $OUT/NAME.tgz
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PARTS=${PARTS:-/tmp/parts} SITE=${SITE:-/tmp/site} META=${META:-/tmp/flotilla-meta} PYTHON=${PYTHON:-python3}

environment() {
  local sources=$SITE:$META
  for source in "$ROOT"/libs/*/src "$ROOT"/services/*/src; do sources=$sources:$source; done
  export PYTHONPATH=$sources PATH=$SITE/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 NO_COLOR=1
  # NVLink multicast may be off for good reasons on a host that others share.
  export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
  export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo VLLM_HOST_IP=127.0.0.1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
  export no_proxy=127.0.0.1,localhost NO_PROXY=127.0.0.1,localhost
  unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY all_proxy
  ulimit -n 65535 2>/dev/null || ulimit -n "$(ulimit -Hn)"
  local shared_mib
  shared_mib=$(df -m --output=size /dev/shm | tail -n 1)
  [ "$shared_mib" -ge 2000 ] || mount -o remount,size=16g /dev/shm || export VLLM_MQ_MAX_CHUNK_BYTES_MB=2
}

case ${1:-} in
part)
  mkdir -p "$PARTS"
  cp "$2" "$PARTS/part$3"
  ls -l "$PARTS/part$3"
  ;;
unpack)
  mkdir -p "$SITE"
  if command -v xz >/dev/null; then
    cat "$PARTS"/part? | xz -dc -T0 | tar -xf - -C "$SITE"
  else
    cat "$PARTS"/part? | "$PYTHON" -c "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall(sys.argv[1], filter='fully_trusted')" "$SITE"
  fi
  chmod +x "$SITE"/bin/*
  [ ! -d "$SITE/ray" ] || find "$SITE/ray" -path '*core/src/ray*' -type f -exec chmod +x {} +
  environment
  "$PYTHON" "$ROOT/bench/gpu/make_importable.py" "$ROOT" "$META" "$SITE"
  "$PYTHON" -m compileall -q -j 0 "$SITE" "$ROOT/libs" "$ROOT/services" >/dev/null 2>&1 || true
  "$PYTHON" -c "import torch, vllm, grpc, flotilla_testing.stack; print('torch', torch.__version__, 'vllm', vllm.__version__, 'grpc', grpc.__version__, torch.cuda.device_count(), 'GPUs')" 2>&1 | tail -n 1
  ;;
run)
  environment
  shift
  cd "$ROOT"
  exec "$@"
  ;;
keep)
  cd "$OUT"
  tar -czf "$2.tgz" --exclude='model*' --exclude='*.safetensors' --exclude='compile*' --exclude='*cache*' --exclude='*.sock' "$2" || true
  rm -rf "${OUT:?}/$2"
  ls -l "$2.tgz"
  ;;
*)
  sed -n 2,8p "$0"
  exit 2
  ;;
esac
