"""What the sections of a configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from kos.errors import ConfigError


class Section(BaseModel):
    """A section of a configuration, with typed values; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class SettingError(ConfigError):
    """A setting has a value that it cannot have: its key, what was expected and got, and the key that demands it."""

    def __init__(self, key: str, expected: str, got: object, because_of: str = "") -> None:
        super().__init__(f"{key}: expected {expected}{because_of and f' ({because_of})'}, got {got}")
        self.key, self.expected, self.got, self.because_of = key, expected, got, because_of
