"""What outlives a session: costs and acceptance, KV, and earlier texts.

Costs belong to model, machine and settings, acceptance to the pair of model files. A session starts with what
earlier ones learned and adds to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from outrider.backends.gguf.model import GgufModel
from outrider.backends.tuning import (
    Loaded,
    costs_at_once,
    costs_of,
    native_of,
    spare_cores,
    subject_of,
)
from outrider.core.contracts import Model, Policy
from outrider.core.notices import collect_notices, notify
from outrider.core.params import Drafting
from outrider.costs.calibrate import Rows
from outrider.costs.other_programs import OtherPrograms
from outrider.costs.store import BUSY, ESTIMATED, PairCosts, store_refined
from outrider.engine.tiers import Disk, KvTiers
from outrider.models.cache import fingerprint, is_first_today, read_entry, write_entry
from outrider.models.hub import cache_dir
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.policy.state import CALIBRATION_KEY, PretrainedCalibration, read_calibration
from outrider.session.options import Keeping, Progress, no_progress

_MIN_VERIFIED = 64
"""A session that verified fewer drafted tokens does not change what is stored about acceptance."""


def prior_in(draft: GgufModel) -> PretrainedCalibration | None:
    """The calibration in a draft's file; None without one or, with a notice, if it cannot be used."""
    if not (text := draft.weights.metadata(CALIBRATION_KEY)):
        return None
    try:
        return read_calibration(text)
    except ValueError as error:
        notify(f"{draft.weights.path}: what it says of its own acceptance is not used: {error}")
        return None


class Learned:
    """An automatic policy for loaded models, with all that is known about them."""

    def __init__(
        self,
        limits: Drafting | FixedPolicy,
        target: Loaded,
        draft: GgufModel | None,
        progress: Progress = no_progress,
        *,
        measure: bool = False,
    ) -> None:
        """Look the costs up; failing that, estimate them in a moment, or `measure` them in some seconds.
        Raises BackendError if a call fails."""
        self._models: dict[str, tuple[Loaded, Rows]] = {"target": (target, "all")}
        if draft is not None:
            self._models["draft"] = (draft, "last")
        self.is_provisional = False
        """whether the costs were estimated, or measured while other programs were busy"""
        costs = self._measured(progress) if measure else self._at_once()
        self.policy = AutoPolicy(costs.target, costs.draft, limits)
        self._recall()

    def _at_once(self) -> PairCosts:
        found = {}
        for role, (model, rows) in self._models.items():
            found[role], is_provisional = costs_at_once(model, rows)
            self.is_provisional |= is_provisional
        if self.is_provisional and is_first_today("costs"):
            notify(ESTIMATED)
        return PairCosts(found["target"], found.get("draft"))

    def _measured(self, progress: Progress, *, fresh: bool = False) -> PairCosts:
        """Each model's costs, looked up or measured; always measured if `fresh`."""
        found = {}
        with collect_notices() as notices:
            for role, (model, rows) in self._models.items():
                what = f"measuring what calls of the {role} model cost here, once"
                found[role] = costs_of(model, rows=rows, fresh=fresh, progress=partial(progress, what))
        self.is_provisional = BUSY in notices
        notify(*notices)
        return PairCosts(found["target"], found.get("draft"))

    def is_disturbed(self, others: OtherPrograms) -> bool:
        return any(others.disturb(spare_cores(native_of(model))) for model, _ in self._models.values())

    def measure_again(self, progress: Progress) -> None:
        """Measure the costs and use them from now on. An exception from `progress` aborts this and changes
        nothing. The models' KV is lost."""
        costs = self._measured(progress, fresh=True)
        self.policy.state.costs = costs.target
        if costs.draft is not None:
            self.policy.state.draft_costs = costs.draft

    def _recall(self) -> None:
        path = self._place()
        known: Mapping[str, Any] | None = read_entry(
            path, "starting without what was learned about acceptance"
        )
        if known is None and "draft" in self._models:
            known = prior_in(native_of(self._models["draft"][0]))
        try:
            if known is not None:
                self.policy.state.recall(known)
        except (KeyError, TypeError, ValueError) as error:
            notify(f"{path}: {error}: starting without what was learned about acceptance")

    def _place(self) -> Path:
        models = [native_of(model) for model, _ in self._models.values()]
        files = [fingerprint(model.weights.path) for model in models]
        files += [json.dumps(changed) for model in models if (changed := model.weights.options.rarely_set())]
        key = blake2b(" ".join(files).encode(), digest_size=12).hexdigest()
        return cache_dir() / "acceptance" / f"{key}.json"

    def keep(self) -> None:
        state = self.policy.state
        store_refined(subject_of(self._models["target"][0], "all"), state.costs)
        if "draft" in self._models:
            store_refined(subject_of(self._models["draft"][0], "last"), state.draft_costs)
        if state.verified.total() >= _MIN_VERIFIED:
            write_entry(self._place(), state.as_json(), quiet=True)


def policy_for(
    asked: Policy | Drafting | None,
    target: Loaded,
    draft: GgufModel | None,
    progress: Progress,
    *,
    measure: bool = False,
) -> tuple[Policy | None, Learned | None]:
    """The policy and, unless it is the caller's own or drafts nothing, what is known about the pair. A target
    that cannot rewind is decoded plainly."""
    limits = asked or Drafting()
    if not (isinstance(limits, Drafting) or (isinstance(limits, FixedPolicy) and limits.draft_max)):
        return limits, None
    if not target.rewinding.is_possible:
        return None, None
    if draft is None and isinstance(limits, Drafting) and limits.policy == "model":
        notify("no draft model is loaded, and the policy asks for one alone: nothing is drafted")
    learned = Learned(limits, target, draft, progress, measure=measure)
    return learned.policy, learned


SAVE_S = 20.0
"""the time that closing a session may take to save its KV"""
_OF_SPEED = ("rows", "several_sequences", "threads", "threads_batch")
"""settings of a cost curve that do not change KV"""


def open_tiers(model: Loaded, keeping: Keeping) -> KvTiers | None:
    """The storage of a target's KV; None if there is none. Raises SettingError for an unusable folder."""
    disk = None
    if keeping.folder is not None:
        disk = Disk(keeping.folder, identity_of(model), keeping.disk_bytes)
    if disk is None and not keeping.memory_bytes:
        return None
    return KvTiers(model, memory_bytes=keeping.memory_bytes, disk=disk)


def identity_of(model: Model) -> str:
    """What KV depends on: the model's content, the library's build, and options."""
    if not isinstance(model, Loaded):
        return model.name
    subject = subject_of(model, "all")
    settings = {name: value for name, value in subject.settings.items() if name not in _OF_SPEED}
    return json.dumps([subject.file, subject.build, sorted(settings.items())])
