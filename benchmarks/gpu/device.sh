#!/bin/bash
# Everything that is measured on a card, in one run that saves as it goes. It needs no network, no root, no root's tools.
#
#   bash benchmarks/gpu/device.sh pack BUNDLE          where there is a network: what the other machine may lack
#   bash benchmarks/gpu/device.sh run BUNDLE OUT       there: rows_calls.jsonl, live_*.jsonl and log, in OUT
#   bash benchmarks/gpu/device.sh report OUT           anywhere: tables of these
#
# BUNDLE may hold wheels, the library (liboutrider-cuda.so; else llama.cpp.tar.xz, which is compiled with the
# toolkit there), a model file with the tokenizer (tiny.gguf), SmolLM2 and the Qwen pair (smollm2.gguf,
# target.gguf, draft.gguf, whole or in parts: NAME.part00, …). What is absent is skipped and said.
# CARD names it for `outrider plan --on`, SHAPES lists shape:quantization, MINUTES limits the whole, SMALL=1 rehearses.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3} BUNDLE=$(realpath -m "$2") HERE=benchmarks/gpu
export PYTHONPATH=$PWD/src:$BUNDLE/site:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

if [ "$1" = pack ]; then
  mkdir -p "$BUNDLE"
  $PYTHON $HERE/make_model.py tiny Q4_K_M "$BUNDLE/tiny.gguf"
  pins=$(grep -E "^(${WHEELS:-pydantic|pydantic-core|annotated-types|typing-inspection|llguidance|gguf})==" requirements.lock)
  ${PIP:-$PYTHON -m pip} download -q --no-deps --only-binary=:all: --python-version "${FOR:-3.12}" -d "$BUNDLE" --platform any \
    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 ${pins//\\/} ||
    echo "no wheels: name a pip with PIP='python3 -m pip'"
  $PYTHON - "$BUNDLE" <<'PY'
import shutil, subprocess, sys, tempfile
from pathlib import Path
from outrider.backends.native import MAINLINE, cuda_library
from outrider.backends.native.build import fetched
bundle, built = Path(sys.argv[1]), cuda_library()
if built:
    shutil.copy(built, bundle)
with tempfile.TemporaryDirectory() as folder:
    source = fetched(MAINLINE, Path(folder), lambda _: None)
    parts = ["CMakeLists.txt", "LICENSE", "cmake", "include", "src", "vendor", "ggml"]
    others = [f for f in (source / "ggml/src").glob("ggml-*/") if f.name not in ("ggml-cpu", "ggml-cuda")]
    left_out = [f"--exclude={folder.relative_to(source)}" for folder in others]
    command = ["tar", "-C", source, "-cJf", bundle / "llama.cpp.tar.xz", *left_out, *parts]
    subprocess.run(command, check=True)
PY
  du -sh "$BUNDLE"/*; exit
fi

if [ "$1" = report ]; then
  $PYTHON $HERE/report.py "$2" --recordings benchmarks/policy/heldout_q4.recordings.jsonl
  for rows in "$2"/live_*[!s].jsonl; do [ -e "$rows" ] && $PYTHON benchmarks/policy/report.py "$rows"; done
  exit
fi

mkdir -p "$3"; OUT=$(realpath "$3"); END=$((SECONDS + 60 * ${MINUTES:-12}))
exec > >(tee -a "$OUT/log") 2>&1
export OUTRIDER_CACHE=$BUNDLE/cache OMP_WAIT_POLICY=passive
part() { # NAME SECONDS COMMAND…: under a limit, and what became of it
  local left=$((END - SECONDS)) limit=$2 started=$SECONDS; [ "$limit" -lt "$left" ] || limit=$left
  [ "$limit" -gt 0 ] || { echo "== $1: no time left"; return 1; }
  echo "== $1 (at most $limit s)"; timeout "$limit" "${@:3}"; local status=$?
  echo "== $1: status $status after $((SECONDS - started)) s"; return $status
}
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free,clocks.max.sm,power.limit --format=csv || echo "no NVIDIA card"
for wheel in "$BUNDLE"/*.whl; do [ -e "$wheel" ] && $PYTHON -m zipfile -e "$wheel" "$BUNDLE/site"; done
for name in smollm2 target draft; do
  [ -e "$BUNDLE/$name.gguf.part00" ] && cat "$BUNDLE/$name.gguf".part* > "$BUNDLE/$name.gguf"
done
# CUDA's own libraries come with PyTorch, among others.
for folder in $($PYTHON -c 'import sys; print(*sys.path)'); do
  for found in "$folder"/nvidia/*/lib; do [ -d "$found" ] && export LD_LIBRARY_PATH=$found:${LD_LIBRARY_PATH:-}; done
done
LIBRARY=${LIBRARY:-$BUNDLE/liboutrider-cuda.so}
if [ ! -e "$LIBRARY" ] && [ -e "$BUNDLE/llama.cpp.tar.xz" ] && command -v nvcc > /dev/null; then
  mkdir -p "$BUNDLE/source" && tar -C "$BUNDLE/source" -xJf "$BUNDLE/llama.cpp.tar.xz"
  part configure 120 cmake -GNinja -Ssrc/outrider/backends/native/recipe -B"$BUNDLE/build" -DSOURCE="$BUNDLE/source" \
    -DNAME=outrider-cuda -DCUDA=ON -DCMAKE_CUDA_ARCHITECTURES=native > /dev/null &&
    part compile 540 cmake --build "$BUNDLE/build" --target outrider-cuda && mv "$BUNDLE/build/liboutrider-cuda.so" "$LIBRARY"
fi
[ -e "$LIBRARY" ] && LOAD=(--llama-library "$LIBRARY") || { LOAD=(); echo "no library for this card: the installed ones"; }
part devices 60 $PYTHON -m outrider setup

EACH_S=8 TOKENS=128; [ -n "${SMALL:-}" ] && EACH_S=1 TOKENS=16
WHERE=$([ -w /dev/shm ] && echo /dev/shm || echo "$BUNDLE")
for each in ${SHAPES-8b:Q4_K_M 1.5b:Q4_K_M 32b:Q4_K_M 0.5b:Q4_K_M 8b:Q8_0 8b:F16 1.5b:Q8_0 1.5b:F16 0.5b:Q8_0 0.5b:F16 32b:Q8_0}; do
  file=$WHERE/random-${each/:/-}.gguf
  part "write $each" 90 $PYTHON $HERE/make_model.py ${each/:/ } "$file" ${TOKENIZER:+--tokenizer "$TOKENIZER"} &&
    part "calls $each" 90 $PYTHON $HERE/calls.py "$file" --out "$OUT/rows_calls.jsonl" --card "${CARD:-}" \
      --seconds $EACH_S --tokens $TOKENS "${LOAD[@]}"
  rm -f "$file"
done
live() { # NAME TARGET [DRAFT]: real texts on the clock
  [ -e "$2" ] || { echo "== $1: no model file"; return; }
  local draft=(); [ -e "${3:-}" ] && draft=(--draft "$3")
  part "live $1" 240 $PYTHON benchmarks/policy/live.py benchmarks/policy/heldout_prompts.jsonl:${EVERY:-1} -t ${THREADS:-2} --model "$2" \
    "${draft[@]}" --fixed 4,8 --repetitions 1 --calibration 4.5 --tokens $TOKENS --out "$OUT/live_$1.jsonl" "${LOAD[@]}"
}
same() { # NAME TARGET [DRAFT]: whether the texts are those of plain decoding
  [ -e "$2" ] || return
  part "verify $1" 60 $PYTHON -m outrider verify --quick -m "$2" ${3:+-md "$3"} "${LOAD[@]}"
  part "bitwise $1" 60 $PYTHON -m outrider verify --quick --bitwise -m "$2" "${LOAD[@]}"
}
live qwen "$BUNDLE/target.gguf" "$BUNDLE/draft.gguf"
SMALL_DRAFT=src/outrider/models/SmolLM2-135M-Instruct.draft.gguf
for each in ${ANSWERS-8b:Q8_0 8b:F16}; do # costs of a large model, texts of SmolLM2
  file=$WHERE/answers-${each/:/-}.gguf
  [ -e "$BUNDLE/smollm2.gguf" ] &&
    part "write $file" 90 $PYTHON $HERE/make_model.py ${each/:/ } "$file" --answers "$BUNDLE/smollm2.gguf"
  live "${each/:/-}" "$file" $SMALL_DRAFT
  rm -f "$file"
done
live smollm2 "$BUNDLE/smollm2.gguf" $SMALL_DRAFT
same smollm2 "$BUNDLE/smollm2.gguf" $SMALL_DRAFT
same qwen "$BUNDLE/target.gguf" "$BUNDLE/draft.gguf"
