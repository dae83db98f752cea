"""Outrider's choice inside vLLM: a proposer for its `custom_class` method.

    vllm serve MODEL --speculative-config '{"method": "custom_class", "model": "outrider.fleet.vllm.Proposer",
                                            "num_speculative_tokens": 16}'

vLLM makes one in each worker and asks it after every step (`vllm/v1/worker/gpu_model_runner.py`). Nothing of
vLLM is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from outrider.core.errors import SettingError
from outrider.core.files import reason_of
from outrider.core.params import Drafting
from outrider.fleet.speculation import Speculation, Tokens
from outrider.policy.auto import LONGEST_DRAFT, AutoPolicy

_log = logging.getLogger("vllm.outrider")  # vLLM prints what loggers below its own name say


class Proposer:
    """Drafts for vLLM's batch, from the requests' own texts and from earlier ones, where that pays.
    `vllm_config` is vLLM's own VllmConfig. `--additional-config '{"outrider": {"earlier": false}}'` leaves
    out the texts of requests that ended, whosever they were. Raises SettingError for settings that cannot be
    used; a failure later is logged in one line, and everything is decoded plainly from then on."""

    def __init__(self, vllm_config: Any) -> None:
        given = (vllm_config.additional_config or {}).get("outrider") or {}
        if given not in ({}, {"earlier": True}, {"earlier": False}):
            reason = f"{given} cannot be used"
            raise SettingError(
                "--additional-config's outrider", reason, 'Give {"earlier": false}, or nothing.'
            )
        max_draft = min(vllm_config.speculative_config.num_speculative_tokens, LONGEST_DRAFT)
        self.speculation = Speculation(
            AutoPolicy(limits=Drafting("lookup", max_draft)),
            max_length=vllm_config.model_config.max_model_len,
            chunk=vllm_config.scheduler_config.max_num_batched_tokens,
            earlier=bool(given.get("earlier", True)),
        )
        self._has_failed = False
        _log.info(
            "outrider: at most %d tokens a draft, none where none pays. With any speculation vLLM refuses "
            "requests that set min_p or logit_bias; with a proposer class it schedules synchronously.",
            max_draft,
        )

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """There is no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Sequence[int],
        token_ids_cpu: Tokens,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """One draft per row of the batch. `sampled_token_ids` are the tokens that each got in the step that
        ended, none while a prompt is being read; `token_ids_cpu` holds the texts, shape (most requests,
        longest text), and `num_tokens_no_spec` their lengths."""
        del slot_mappings
        if self._has_failed:
            return [[] for _ in sampled_token_ids]
        try:
            drafts = self.speculation.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            notices = self.speculation.policy.notices
            for notice in notices:
                _log.info("outrider: %s", notice)
            notices.clear()
        except Exception as error:  # whatever it is, it must not end the engine
            self._has_failed = True
            _log.error(
                "outrider: nothing is drafted any more: %s (%s)", reason_of(error), type(error).__name__
            )
            return [[] for _ in sampled_token_ids]
        return drafts
