"""Checking a JSON document that another command wrote."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from autospec.errors import InputError

_SHOWN_MISTAKES = 5


class Form(BaseModel):
    """A part of a document; what a report does not need is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


FormT = TypeVar("FormT", bound=Form)


def read_form(form: type[FormT], document: object, source: str, command: str) -> FormT:
    """The document as ``form``. Raises InputError that names the keys that are wrong."""
    try:
        return form.model_validate(document)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        mistakes = []
        for each in errors[:_SHOWN_MISTAKES]:
            key = ".".join(str(part) for part in each["loc"]) or "the file"
            found = "" if each["type"] == "missing" else f", found {str(each['input'])[:60]}"
            mistakes.append(f"{key}: {each['msg']}{found}")
        if len(errors) > _SHOWN_MISTAKES:
            mistakes.append(f"and {len(errors) - _SHOWN_MISTAKES} more")
        raise InputError(
            f"{source}: is not what 'autospec {command} --json' writes:\n  " + "\n  ".join(mistakes)
        ) from None
