"""The errors AutoSpec raises on purpose. Messages name the place, the value, what is allowed."""

from __future__ import annotations


class AutoSpecError(Exception):
    """Root of the tree."""


class ConfigError(AutoSpecError):
    """A policy file or a setting is wrong."""


class ProfileError(AutoSpecError):
    """A profile cannot be read, written or merged."""


class ProfileMismatch(ProfileError):
    """A profile was learned for something else; the message names the field that differs."""


class CorruptProfile(ProfileError):
    """A file is no readable profile, as after a disk fault; it may be set aside."""


class ExportError(AutoSpecError):
    """A profile cannot be expressed in an engine's own configuration."""


class InputError(AutoSpecError):
    """A prompts file, trace, journal or request is wrong."""


class EngineError(AutoSpecError):
    """The embedded engine or an adapter cannot do what it was asked."""


class ModelError(EngineError):
    """A model folder is missing, incomplete or does not fit the target."""


class MissingDependency(AutoSpecError):
    """An optional dependency is not installed; the message says what to install."""
