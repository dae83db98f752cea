"""A plan as what other engines start from: vLLM and llama.cpp's server."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.numbers import counted
from outrider.lab.plan.calls import PlannedModel
from outrider.lab.plan.plan import Plan, Way
from outrider.lab.plan.shapes import HEADS

_HEAD_NAME = "NAME-OF-THE-HEAD"
_NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""vLLM's lookup, with matches of 2 to 5 tokens"""
_CHECKPOINTS = ("int4", "awq", "gptq", "nvfp4", "mxfp4", "int8")
"""types of weights that an engine does not make by itself"""
_LLAMA_HEADS = {"mtp": "draft-mtp", "eagle3": "draft-eagle3"}


@dataclass(frozen=True, slots=True)
class Export:
    """What an engine is started with. `config` is vLLM's --speculative-config, or llama-server's drafting
    flags with their values; None where the plan is to decode plainly. `notes` say what is predicted and what
    to know, a sentence each."""

    engine: str
    command: Sequence[str]
    config: Mapping[str, Any] | None
    notes: Sequence[str]

    @property
    def script(self) -> str:
        """The command as a shell script, with the notes as its comments."""
        return "\n".join([*(f"# {note}" for note in self.notes), shlex.join(self.command)]) + "\n"


def _loaded_name(model: PlannedModel) -> str:
    return model.shape.hub or model.name


def _is_made_8_bit(model: PlannedModel) -> bool:
    """Whether vLLM makes its 8-bit weights of a checkpoint that comes in others."""
    return model.name.endswith(":fp8")


def _draft_of(plan: Plan, way: Way | None) -> PlannedModel | None:
    return next((draft for draft in plan.asked.drafts if way and draft.name == way.draft), None)


def _notes(plan: Plan, way: Way | None, engine: str) -> list[str]:
    asked, batch = plan.asked, plan.batches[0]
    start = f"Outrider's plan for {engine}: {asked.target.name} on {asked.machine.name}, "
    start += f"{batch.batch} x {asked.context} tokens: {batch.plain_tokens_per_s:.0f} tokens/s plainly"
    if way is None:
        return [f"{start}; no draft is expected to pay."]
    found = [
        f"{start}, {way.tokens_per_s:.0f} with {way.name} drafting {way.draft_length} "
        f"({way.speedup:.2f}x): a prediction, not a measurement."
    ]
    if plan.pays_to is not None:
        most = counted(plan.pays_to, "sequence")
        found.append(f"Above {most} at once drafts are expected to cost more than they gain.")
    models = (asked.target, *asked.drafts)
    if others := [model.name for model in models if model.name.rpartition(":")[2] in _CHECKPOINTS]:
        found.append(f"{', '.join(others)}: name a checkpoint of that type, the one below has other weights.")
    if way.draft in HEADS and way.draft != "mtp":
        found.append(f"Put the head's own name in the place of {_HEAD_NAME}.")
    return found


def _vllm(plan: Plan) -> Export:
    asked, way = plan.asked, plan.chosen(joins=False)
    draft, devices = _draft_of(plan, way), plan.asked.machine.count
    command = ["vllm", "serve", _loaded_name(asked.target)]
    command += ["--tensor-parallel-size", str(devices)] if devices > 1 else []
    command += ["--max-model-len", str(asked.context), "--max-num-seqs", str(max(asked.batches))]
    command += ["--quantization", "fp8"] if _is_made_8_bit(asked.target) else []
    notes = _notes(plan, way, "vLLM")
    if way is None:
        return Export("vllm", command, None, notes)
    config: dict[str, Any] = {"num_speculative_tokens": way.draft_length}
    if draft is None:
        config |= _NGRAM
    elif draft.name in HEADS:
        config |= {"method": way.draft} | ({} if way.draft == "mtp" else {"model": _HEAD_NAME})
    else:
        config |= {"method": "draft_model", "model": _loaded_name(draft)}
        config |= {"draft_tensor_parallel_size": _draft_devices(plan, draft)} if devices > 1 else {}
        config |= {"quantization": "fp8"} if _is_made_8_bit(draft) else {}
    notes.append("With a speculative config vLLM refuses requests with min_p or logit_bias.")
    return Export("vllm", [*command, "--speculative-config", json.dumps(config)], config, notes)


def _draft_devices(plan: Plan, draft: PlannedModel) -> int:
    """1 or all, as vLLM has it: where the draft's steps are faster."""
    machine = plan.asked.machine
    one, all_ = (
        PlannedModel(draft.shape, (place,)).call_s(1, context=plan.asked.context)
        for place in (replace(machine, count=1), machine)
    )
    return 1 if one <= all_ else machine.count


def _llama_server(plan: Plan) -> Export:
    asked, way = plan.asked, plan.chosen(joins=True)
    draft, most = _draft_of(plan, way), max(asked.batches)
    notes = _notes(plan, way, "llama-server")

    def file_of(model: PlannedModel) -> str:
        """Which repositories have one of it is not known here."""
        name = _loaded_name(model)
        return name if name.endswith(".gguf") else f"{model.name.replace(':', '-')}.gguf"

    command = ["llama-server", "-m", file_of(asked.target)]
    command += ["-c", str(asked.context * most), "-np", str(most)]
    kinds, flags = list[str](), dict[str, Any]()
    if way is not None and draft is not None:
        kinds.append(_LLAMA_HEADS.get(draft.name, "draft-simple"))
        flags["--spec-draft-n-max"] = way.draft_length
        if draft.name != "mtp":
            flags["-md"] = _HEAD_NAME if draft.name in HEADS else file_of(draft)
    if way is not None and way.drafters != "draft":
        kinds.append("ngram-simple")
        flags["--spec-ngram-simple-size-m"] = way.draft_length
    if not _loaded_name(asked.target).endswith(".gguf"):
        notes.append("Put your own files in the place of -m and -md.")
    flags = {"--spec-type": ",".join(kinds), **flags} if kinds else {}
    words = [str(word) for pair in flags.items() for word in pair]
    return Export("llama-server", [*command, *words], flags or None, notes)


ENGINES: Mapping[str, Callable[[Plan], Export]] = {"vllm": _vllm, "llama-server": _llama_server}
"""What each engine is started with for a plan, by its name; the first batch size decides who drafts."""
