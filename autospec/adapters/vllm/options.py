"""What ``--additional-config '{"autospec": {...}}'`` may say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autospec.config import JournalSettings, ProfileSettings, Settings, load_settings
from autospec.errors import ConfigError

KEY = "autospec"
"""The key of AutoSpec's part in vLLM's ``additional_config``."""

Lookup = Literal["ngram", "suffix"]


class AdapterOptions(BaseModel):
    """AutoSpec's options inside vLLM; everything else is said by the policy file.

    ``lookups`` are AutoSpec's own proposers beside the configured one. ``profile`` and ``journal``
    overrule the policy file's paths. ``model_max_k`` caps what the configured model drafts, where
    ``num_speculative_tokens`` is larger for the lookups' sake. ``cache_tokens`` of ended requests
    stay for suffix lookups of later ones; requests above ``lookup_tokens`` get no lookups. What a
    profile was tuned to comes before ``cache_tokens``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: str = "default"
    profile: Path | None = None
    save_every_seconds: Annotated[float, Field(gt=0)] | None = None
    journal: Path | None = None
    lookups: tuple[Lookup, ...] = ("ngram", "suffix")
    model_max_k: Annotated[int, Field(ge=1, le=64)] | None = None
    lookup_tokens: Annotated[int, Field(ge=1)] = 32768
    cache_tokens: Annotated[int, Field(ge=0)] = 1 << 18
    metrics: bool = True
    seed: int = 0

    def settings(self) -> Settings:
        """The policy file's settings with these paths. Raises ConfigError."""
        settings = load_settings(self.policy, profile=self.profile)
        profile = settings.profile.model_dump()
        if self.save_every_seconds is not None:
            profile["save_every_seconds"] = self.save_every_seconds
        journal = settings.journal.model_dump()
        if self.journal is not None:
            journal["path"] = self.journal.expanduser()
        return settings.model_copy(
            update={
                "profile": ProfileSettings.model_validate(profile),
                "journal": JournalSettings.model_validate(journal),
            }
        )


def parse_options(additional_config: object) -> AdapterOptions:
    """The options in vLLM's ``additional_config``; defaults where it has none of ours.

    Raises ConfigError that names every wrong key, what was found and what is allowed.
    """
    part = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
    if not isinstance(part, dict):
        raise ConfigError(
            f"additional_config.{KEY}: must be a mapping such as {{'policy': 'default'}}, "
            f"found {part!r}"
        )
    try:
        return AdapterOptions.model_validate(part)
    except ValidationError as error:
        allowed = ", ".join(AdapterOptions.model_fields)
        mistakes = "; ".join(
            f"{KEY}.{'.'.join(map(str, each['loc']))}: {each['msg']}, found {each['input']!r}"
            for each in error.errors(include_url=False)
        )
        raise ConfigError(f"additional_config: {mistakes}; the keys are {allowed}") from None
