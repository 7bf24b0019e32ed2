"""What `faser serve` was told, as it travels to the engine process inside vLLM's `additional_config`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

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
    """policy: what `make_policy` takes. profile: what `load_profile` takes. predictor: what `load_predictor` takes, or
    None: a draft's confidences are taken at their word. log: file of the step log, or None. benched: start with the
    policy benched. admin: what `faser.serving.admin` may do; None: nothing.
    """

    policy: str
    profile: str
    predictor: str | None = None
    log: str | None = None
    benched: bool = False
    admin: AdminSettings | None = None
    controller: ControllerConfig = field(default_factory=ControllerConfig)

    def to_config(self) -> dict[str, Any]:
        """For `additional_config`: JSON types only."""
        return {KEY: asdict(self)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Settings:
        """The settings that `to_config` wrote."""
        data = dict(config[KEY])
        admin = AdminSettings(**data["admin"]) if data["admin"] else None
        return cls(**data | {"controller": ControllerConfig(**data["controller"]), "admin": admin})
