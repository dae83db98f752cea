"""Run by a Python that has vLLM, with MODEL.gguf FOLDER SPECULATIVE_CONFIG. The last line is JSON."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

TEXT = "Repeat this: the boat crosses the river, the men sell their fish. The boat crosses the river again."


def main() -> None:
    source, folder, speculation = sys.argv[1:]
    if not Path(folder, "config.json").exists():
        script = Path(__file__).parents[1] / "benchmarks" / "vllm" / "dequantize.py"
        sys.argv = [str(script), source, folder]
        runpy.run_path(str(script), run_name="__main__")
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 4, "dtype": "float32"}
    options |= {"enforce_eager": True, "disable_log_stats": False}
    model = LLM(folder, speculative_config=json.loads(speculation), **options)
    asked = [[{"role": "user", "content": text}] for text in (TEXT, "Say hello.", TEXT + " Why?")]
    answers = model.chat(asked, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    counts = {metric.name: metric.value for metric in model.get_metrics() if hasattr(metric, "value")}
    accepted = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
    print(json.dumps({"tokens": [answer.outputs[0].token_ids for answer in answers], "accepted": accepted}))


if __name__ == "__main__":
    main()
