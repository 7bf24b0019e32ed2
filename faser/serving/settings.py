"""What `faser serve` was told, as it travels to the engine process inside vLLM's `additional_config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from faser.ab.split import Split
from faser.controller import ControllerConfig

KEY = "faser"


ADMIN_KEY = "FASER_ADMIN_KEY"
"""Environment variable of the admin key, of a server and of those who ask it."""


class UsageError(ValueError):
    """The user's mistake, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminSettings:
    """policy_dir: folder of the policy files that may be swapped in. state: file that keeps a swap over a restart, or
    None. remote: whether other machines may ask too.
    """

    policy_dir: str
    state: str | None = None
    remote: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """policy: what `make_policy` takes. split: the A/B test that runs instead, or None. profile: what `load_profile`
    takes. predictor: what `load_predictor` takes, or None: a draft's confidences are taken at their word. log: file of
    the decision log, or None; log_max_mb, log_keep: its rotation, see `step_log`; log_prompts: with the tokens of
    requests. restored: the policy is what a swap or a stop left, so the draft stays loaded even for `none`, to swap
    another in. benched: start with the policy benched. admin: what `faser.serving.admin` may do; None: nothing.
    """

    policy: str
    profile: str
    split: Split | None = None
    predictor: str | None = None
    log: str | None = None
    log_max_mb: float | None = None
    log_keep: int = 0
    log_prompts: bool = False
    restored: bool = False
    benched: bool = False
    admin: AdminSettings | None = None
    controller: ControllerConfig = field(default_factory=ControllerConfig)

    def to_config(self) -> dict[str, Any]:
        """For `additional_config`: JSON types only."""
        return {KEY: {**asdict(self), "split": self.split.to_json() if self.split else None}}

    @property
    def policies(self) -> list[str]:
        """All that may decide."""
        return [self.policy] if self.split is None else [arm.policy for arm in self.split.arms]

    @property
    def speculates(self) -> bool:
        """Whether a draft is needed."""
        return self.restored or any(policy != "none" for policy in self.policies)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Settings:
        """The settings that `to_config` wrote."""
        data = dict(config[KEY])
        admin = AdminSettings(**data["admin"]) if data["admin"] else None
        split = Split.from_json(data["split"]) if data["split"] else None
        return cls(**data | {"controller": ControllerConfig(**data["controller"]), "admin": admin, "split": split})
