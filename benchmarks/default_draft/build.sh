#!/usr/bin/env bash
# Builds a draft for the embedded default, from nothing: an estimated 3 to 5 hours on 2 cores. As a whole it was
# never run: README.md says what the second trial, whose steps these are, differed in.
#
#     benchmarks/default_draft/build.sh FOLDER
#
# The file is FOLDER/second/SmolLM2-135M-Instruct.draft.gguf. Stopped, it goes on where it was.
set -euo pipefail
folder=${1:?a folder for answers and drafts}
mkdir -p "$folder"

# What the target says to 12,000 of the bundled prompts.
data=(--num-prompts 12000 --max-tokens 160 --answers "$folder/answers")
outrider distill "${data[@]}" --answers-only -o "$folder/first"

# The first and the last two layers, with 8,191 tokens.
outrider distill "${data[@]}" --layers 4 --vocabulary 8192 --embedding-quant Q8_0 --steps 851 \
    --no-report --name first -o "$folder/first"

# Half as many tokens more, in four bits: no larger, and cheaper to ask.
outrider distill "${data[@]}" --continue "$folder/first/first.gguf" --vocabulary 12288 --embedding-quant Q4_0 \
    --minutes 45 --learning-rate 0.002 --name SmolLM2-135M-Instruct.draft -o "$folder/second"
