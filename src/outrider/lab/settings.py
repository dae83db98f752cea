"""A setting of speculation: who drafts, and how far. One name for each, in files, tables and commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from outrider.core.contracts import Policy
from outrider.core.errors import SettingError
from outrider.core.params import Drafting
from outrider.costs import CallCosts
from outrider.policy.auto import AutoPolicy
from outrider.policy.fixed import FixedPolicy
from outrider.policy.state import PretrainedCalibration

Drafters = Literal["none", "lookup", "model", "both"]

_NAME = re.compile(r"(?P<who>lookup|model|both) (?P<length>\d+)(?:/(?P<p_min>[\d.]+))?")


@dataclass(frozen=True, slots=True)
class Setting:
    """Who drafts, and up to how many tokens: `draft_max` None decides by itself.

    A fixed draft ends before a token whose probability is below `p_min`.

    >>> Setting("model", 3, 0.75).name
    'model 3/0.75'
    >>> Setting.of("lookup 8") == Setting("lookup", 8)
    True
    """

    drafters: Drafters
    draft_max: int | None = None
    p_min: float = 0.0

    @property
    def name(self) -> str:
        """As `of` reads it: "plain", "auto", "auto lookup", "auto model", "model 3", "both 8/0.75"."""
        if self.drafters == "none":
            return "plain"
        if self.draft_max is None:
            return "auto" if self.drafters == "both" else f"auto {self.drafters}"
        return f"{self.drafters} {self.draft_max}" + (f"/{self.p_min:g}" if self.p_min else "")

    @property
    def uses_model(self) -> bool:
        return self.drafters in ("model", "both")

    @property
    def uses_lookup(self) -> bool:
        return self.drafters in ("lookup", "both")

    @property
    def flags(self) -> list[str]:
        """What `outrider run` is given for it, beside the models.

        >>> Setting("lookup", 8).flags
        ['--policy', 'fixed', '--draft-max', '8', '--draft-p-min', '0']
        """
        if self.drafters == "none":
            return ["--policy", "plain"]
        if self.draft_max is None:
            return [] if self.drafters == "both" else ["--policy", self.drafters]
        lengths = ["--draft-max", str(self.draft_max), "--draft-p-min", f"{self.p_min:g}"]
        return ["--policy", "fixed", *lengths, *([] if self.uses_lookup else ["--no-lookup"])]

    @property
    def is_auto(self) -> bool:
        return self.drafters != "none" and self.draft_max is None

    def policy(
        self,
        costs: CallCosts,
        draft_costs: Mapping[str, CallCosts],
        prior: PretrainedCalibration | None = None,
    ) -> Policy:
        """A fresh policy; an automatic one begins with copies of these curves and with what the draft's file
        says of its acceptance, and learns on them."""
        if self.drafters == "none":
            return FixedPolicy(0)
        if self.draft_max is not None:
            return FixedPolicy(self.draft_max, self.p_min)
        [draft] = draft_costs.values() if self.uses_model and draft_costs else [None]
        curve = None if draft is None else _copy(draft)
        limits = Drafting("auto" if self.drafters == "both" else self.drafters)
        policy = AutoPolicy(_copy(costs), curve, limits)
        if draft is not None and prior is not None:
            policy.state.recall(prior)
        return policy

    @classmethod
    def of(cls, name: str) -> Setting:
        """The setting of this name. Raises SettingError for any other text."""
        named = {s.name: s for s in (PLAIN, AUTO, AUTO_LOOKUP, AUTO_MODEL)}
        if name in named:
            return named[name]
        match = _NAME.fullmatch(name)
        p_min = float(match["p_min"] or 0) if match else 0.0
        if not match or not 0 <= p_min <= 1 or int(match["length"]) < 1:
            raise SettingError(
                repr(name), "it is not a setting", "Write plain, auto, lookup 8, model 3 or both 8/0.75."
            )
        return cls(cast(Drafters, match["who"]), int(match["length"]), p_min)


def _copy(curve: CallCosts) -> CallCosts:
    return CallCosts.from_json(curve.as_json())


PLAIN = Setting("none")
AUTO = Setting("both")
"""Decides by itself among everything there is."""
AUTO_LOOKUP = Setting("lookup")
AUTO_MODEL = Setting("model")
