"""A plan as what other engines start from: vLLM, SGLang and llama.cpp's server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.numbers import counted
from outrider.lab.plan.calls import PlannedModel
from outrider.lab.plan.plan import SIZES, Plan, Way, plan_batch
from outrider.lab.plan.shapes import HEADS

_HEAD_NAME = "NAME-OF-THE-HEAD"
_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""vLLM's lookup, with matches of 2 to 5 tokens"""
_CHECKPOINTS = ("int4", "awq", "gptq", "nvfp4", "mxfp4", "int8")
"""types of weights that an engine does not make by itself"""
_SGLANG_HEADS = {"mtp": "NEXTN", "eagle": "EAGLE", "eagle3": "EAGLE3"}
_LLAMA_HEADS = {"mtp": "draft-mtp", "eagle3": "draft-eagle3"}


@dataclass(frozen=True, slots=True)
class Export:
    """What an engine is started with. `config` is vLLM's --speculative-config, or the drafting flags of
    others with their values; None where the plan is to decode plainly. `notes` say what is predicted and what
    to know, a sentence each."""

    engine: str
    command: Sequence[str]
    config: Mapping[str, Any] | None
    notes: Sequence[str]

    @property
    def script(self) -> str:
        """The command as a shell script, with the notes as its comments."""
        return "\n".join([*(f"# {note}" for note in self.notes), shlex.join(self.command)]) + "\n"


class _Pair:
    """What is exported of a plan: its models by the names that engines load, and the way that is chosen for
    the first batch size. `joins`: the engine lets lookup and a draft model draft together."""

    def __init__(self, plan: Plan, *, joins: bool = False) -> None:
        asked, way = plan.asked, plan.chosen(joins=joins)
        self.plan, self.way, self.context, self.most = plan, way, asked.context, max(asked.batches)
        self.devices = asked.machine.count
        self.draft = next((model for model in asked.drafts if way and model.name == way.draft), None)
        self.target_name = _loaded_name(asked.target)
        self.is_head = self.draft is not None and self.draft.name in HEADS
        self.draft_name = _HEAD_NAME if self.is_head else _loaded_name(self.draft) if self.draft else ""

    def schedule(self, way: Way) -> list[list[int]]:
        """The best draft length of one drafter by batch size, in ranges that begin at 1: [from, to, length],
        the length 0 where it does not pay."""
        found: list[list[int]] = []
        sizes = [*(size for size in SIZES if size < self.most), self.most]
        for size, beyond in zip(sizes, [*sizes[1:], self.most + 1], strict=True):
            best = plan_batch(self.plan.asked, size).best_of(way.drafting, way.draft)
            length = best.length if best is not None and best.speedup.value > 1 else 0
            if found and found[-1][2] == length:
                found[-1][1] = beyond - 1
            else:
                found.append([size, beyond - 1, length])
        return found

    def notes(self, engine: str) -> list[str]:
        """What is predicted, and what to know."""
        plan, way, batch = self.plan, self.way, self.plan.batches[0]
        start = f"Outrider's plan for {engine}: {plan.asked.target.name} on {plan.asked.machine.name}, "
        start += f"{batch.batch} x {self.context} tokens: {batch.plain_tokens_per_s:.0f} tokens/s plainly"
        if way is None:
            return [f"{start}; no draft is expected to pay."]
        found = [
            f"{start}, {way.tokens_per_s:.0f} with {way.name} drafting {way.length} "
            f"({way.speedup.value:.2f}x): a prediction, not a measurement."
        ]
        if plan.pays_to is not None:
            most = counted(plan.pays_to, "sequence")
            found.append(f"Above {most} at once drafts are expected to cost more than they gain.")
        if others := [m.name for m in plan.asked.models if m.name.rpartition(":")[2] in _CHECKPOINTS]:
            found.append(
                f"{', '.join(others)}: name a checkpoint of that type, the one below has other weights."
            )
        if self.is_head and way.draft != "mtp":
            found.append(f"Put the head's own name in the place of {_HEAD_NAME}.")
        return found

    @property
    def draft_devices(self) -> int:
        """1 or all, as vLLM has it: where the draft's steps are faster."""
        assert self.draft is not None
        machine = self.plan.asked.machine
        one, all_ = (
            PlannedModel(self.draft.shape, (place,)).call_s(1, context=self.context)
            for place in (replace(machine, count=1), machine)
        )
        return 1 if one <= all_ else self.devices


def _loaded_name(model: PlannedModel) -> str:
    return model.shape.hub or model.name


def _quantized(model: PlannedModel | None) -> list[str]:
    """What has an engine make 8-bit weights of a checkpoint that comes in others."""
    return ["--quantization", "fp8"] if model is not None and model.name.endswith(":fp8") else []


def _vllm(plan: Plan) -> Export:
    pair = _Pair(plan)
    command = ["vllm", "serve", pair.target_name]
    if pair.devices > 1:
        command += ["--tensor-parallel-size", str(pair.devices)]
    command += ["--max-model-len", str(pair.context), "--max-num-seqs", str(pair.most)]
    command += _quantized(plan.asked.target)
    notes = pair.notes("vLLM")
    if (way := pair.way) is None:
        return Export("vllm", command, None, notes)
    lengths = pair.schedule(way)
    config: dict[str, Any] = {"num_speculative_tokens": max(length for *_, length in lengths)}
    if way.drafting == "lookup":
        config |= _NGRAM
    elif pair.is_head:
        config |= {"method": way.draft} | ({} if way.draft == "mtp" else {"model": pair.draft_name})
    else:
        config |= {"method": "draft_model", "model": pair.draft_name}
        config |= {"draft_tensor_parallel_size": pair.draft_devices} if pair.devices > 1 else {}
        config |= {"quantization": "fp8"} if _quantized(pair.draft) else {}
    if len(lengths) > 1:
        config["num_speculative_tokens_per_batch_size"] = lengths
        notes.append(
            "Lengths by batch size are tried by vLLM with EAGLE heads and DFlash alone; leave out "
            "num_speculative_tokens_per_batch_size where its version refuses it."
        )
    notes.append("With a speculative config vLLM refuses requests with min_p or logit_bias.")
    return Export("vllm", [*command, "--speculative-config", json.dumps(config)], config, notes)


def _with_flags(
    engine: str, command: Sequence[str], flags: Mapping[str, Any], notes: Sequence[str]
) -> Export:
    words = [str(word) for pair in flags.items() for word in pair]
    return Export(engine, [*command, *words], flags or None, notes)


def _sglang(plan: Plan) -> Export:
    pair = _Pair(plan)
    notes = pair.notes("SGLang")
    command = ["python", "-m", "sglang.launch_server", "--model-path", pair.target_name]
    if pair.devices > 1:
        command += ["--tp-size", str(pair.devices)]
    command += ["--context-length", str(pair.context), "--max-running-requests", str(pair.most)]
    command += _quantized(plan.asked.target)
    flags: dict[str, Any] = {}
    if (way := pair.way) is not None and plan.pays_to is not None and plan.pays_to < pair.most:
        notes.append(
            "SGLang drafts at every batch size: start a second server without drafts for larger ones."
        )
    if way is not None and way.drafting == "lookup":
        flags["--speculative-algorithm"] = "NGRAM"
        flags["--speculative-ngram-max-bfs-breadth"] = 1  # a chain, as it is planned
    elif way is not None:
        flags["--speculative-algorithm"] = _SGLANG_HEADS.get(way.draft, "STANDALONE")
        if way.draft != "mtp":
            flags["--speculative-draft-model-path"] = pair.draft_name
        flags |= {"--speculative-num-steps": way.length, "--speculative-eagle-topk": 1}
    if way is not None:
        flags["--speculative-num-draft-tokens"] = way.length + 1
    return _with_flags("sglang", command, flags, notes)


def _llama_server(plan: Plan) -> Export:
    pair = _Pair(plan, joins=True)
    notes = pair.notes("llama-server")

    def file_of(model: PlannedModel) -> str:
        """Which repositories have one of it is not known here."""
        name = _loaded_name(model)
        return name if name.endswith(".gguf") else f"{model.name.replace(':', '-')}.gguf"

    command = ["llama-server", "-m", file_of(plan.asked.target)]
    command += ["-c", str(pair.context * pair.most), "-np", str(pair.most)]
    kinds, flags = list[str](), dict[str, Any]()
    if (way := pair.way) is not None and way.drafting != "lookup":
        kinds.append(_LLAMA_HEADS.get(way.draft, "draft-simple"))
        flags["--spec-draft-n-max"] = way.length
        if way.draft != "mtp" and pair.draft is not None:
            flags["-md"] = pair.draft_name if pair.is_head else file_of(pair.draft)
    if way is not None and way.drafting != "draft":
        kinds.append("ngram-simple")
        flags["--spec-ngram-simple-size-m"] = way.length
    if not pair.target_name.endswith(".gguf"):
        notes.append("Put your own files in the place of -m and -md.")
    return _with_flags(
        "llama-server", command, {"--spec-type": ",".join(kinds), **flags} if kinds else {}, notes
    )


ENGINES: Mapping[str, Callable[[Plan], Export]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama-server": _llama_server,
}
"""What each engine is started with for a plan, by its name; the first batch size decides who drafts."""
