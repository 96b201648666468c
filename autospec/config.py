"""Policy files: YAML -> validated, frozen ``Settings``, with errors a person can act on."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from autospec.errors import ConfigError
from autospec.policy import OPTIONS
from autospec.policy.base import PolicyOptions
from autospec.workload import WorkloadRule

DEFAULT_POLICY = "goodput"

Location: TypeAlias = tuple[str | int, ...]


def policy_names() -> tuple[str, ...]:
    """Names of the policies that ``policy.name`` may take."""
    return tuple(_option_classes())


def _option_classes() -> dict[str, type[PolicyOptions]]:
    return {get_args(options.model_fields["name"].annotation)[0]: options for options in OPTIONS}


if TYPE_CHECKING:
    AnyPolicy: TypeAlias = PolicyOptions
else:
    AnyPolicy = Annotated[Union[OPTIONS], Field(discriminator="name")]  # noqa: UP007


def _default_policy() -> AnyPolicy:
    return _option_classes()[DEFAULT_POLICY].model_validate({"name": DEFAULT_POLICY})


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GuardSettings(_Section):
    """Do no harm: back to plain decoding when goodput falls below its estimate for plain."""

    enabled: bool = True
    margin: Annotated[
        float, Field(ge=0, lt=1, description="loss against plain decoding that is tolerated")
    ] = 0.02
    window_steps: Annotated[int, Field(ge=1, description="steps that goodput is taken over")] = 64
    hold_steps: Annotated[int, Field(ge=1, description="steps without speculation after it")] = 32


class ProbeSettings(_Section):
    """Trying what is not in use (a model proposer, plain decoding), so that it stays known."""

    enabled: bool = True
    first_steps: Annotated[int, Field(ge=1, description="steps until the first probe")] = 16
    backoff: Annotated[
        float, Field(ge=1, description="factor on the interval after a probe that did not pay")
    ] = 2.0
    max_interval_steps: Annotated[int, Field(ge=1, description="longest interval")] = 2048


class LearningSettings(_Section):
    """How fast what was learned is forgotten."""

    half_life_tokens: Annotated[
        float,
        Field(ge=1, description="verified tokens of a kind after which an older one counts half"),
    ] = 1024.0
    drift: Annotated[
        bool, Field(description="forget faster when acceptance or step time changes suddenly")
    ] = True


class WorkloadSettings(_Section):
    """Which workload a request without a label of its own belongs to; the first match wins."""

    rules: tuple[WorkloadRule, ...] = ()


def _named_file(path: Path) -> Path:
    if path == Path():
        raise ValueError("must name a file; null for none")
    return path.expanduser()


File = Annotated[Path, AfterValidator(_named_file)]


class ProfileSettings(_Section):
    """Where what is learned is loaded from and saved to; null keeps nothing."""

    path: File | None = None
    save_every_seconds: Annotated[float, Field(gt=0)] = 300.0
    half_life_days: Annotated[
        float, Field(gt=0, description="age at which a saved observation counts half")
    ] = 30.0


class JournalSettings(_Section):
    """Where decisions and outcomes are written, one JSON line a step; null writes none."""

    path: File | None = None
    max_bytes: Annotated[
        int, Field(ge=1 << 16, description="the file is set aside as PATH.1 at this size")
    ] = 256 << 20


class MetricsSettings(_Section):
    """Prometheus endpoint of a controller that is given no metrics, and of ``bench`` and ``demo``;
    null opens none. ``serve`` and vLLM have their own."""

    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    address: str = "127.0.0.1"


class Settings(_Section):
    """Everything a policy file says."""

    version: Literal[1]
    policy: AnyPolicy = Field(default_factory=_default_policy)
    max_k: Annotated[int, Field(ge=0, le=64, description="cap on k for every request")] = 32
    proposers: Annotated[
        tuple[str, ...] | None, Field(description="proposers that may draft; null allows all")
    ] = None
    tpot_target_ms: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="time per output token of a request that has no target of its own (slo)",
    )
    guard: GuardSettings = GuardSettings()
    probe: ProbeSettings = ProbeSettings()
    learning: LearningSettings = LearningSettings()
    workloads: WorkloadSettings = WorkloadSettings()
    profile: ProfileSettings = ProfileSettings()
    journal: JournalSettings = JournalSettings()
    metrics: MetricsSettings = MetricsSettings()

    def without_files(self) -> Settings:
        """The same with no profile, journal or endpoint: nothing is read, written or opened."""
        return self.model_copy(
            update={
                "profile": self.profile.model_copy(update={"path": None}),
                "journal": self.journal.model_copy(update={"path": None}),
                "metrics": self.metrics.model_copy(update={"port": None}),
            }
        )

    def with_profile(self, path: Path | None) -> Settings:
        """The same with another file to start from and save to, or none."""
        profile = self.profile.model_copy(update={"path": path})
        return self.model_copy(update={"profile": profile})


def policies_folder() -> Path:
    """The folder of the policy files that come with AutoSpec: in the package, or in a checkout."""
    package = Path(__file__).parent
    installed = package / "policies"
    return installed if installed.is_dir() else package.parent / "policies"


def installed_policies() -> tuple[str, ...]:
    """Names that ``load_settings`` takes besides paths."""
    return tuple(sorted(path.stem for path in policies_folder().glob("*.yaml")))


def load_settings(name_or_path: str | Path, *, profile: str | Path | None = None) -> Settings:
    """Settings of an installed policy file, by name, or of the file at a path.

    ``profile``, if given, is the file to start from and save to instead of the one named there.
    Raises ConfigError that lists every mistake with its line, key, value and what is allowed.
    """
    path = _find_policy_file(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    settings = parse_settings(text, source=str(path))
    return settings if profile is None else settings.with_profile(Path(profile).expanduser())


def _find_policy_file(name_or_path: str | Path) -> Path:
    name = str(name_or_path)
    names = installed_policies()
    if name in names:
        return policies_folder() / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.exists():
        return path
    if path.suffix in {".yaml", ".yml"} or len(path.parts) > 1:
        raise ConfigError(f"{path}: no such policy file")
    raise ConfigError(f"unknown policy file {name!r}{_allowed(names, name)}; or give a path")


def parse_settings(text: str, source: str = "policy") -> Settings:
    """Settings of a policy file's text. ``source`` names it in errors."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {_yaml_complaint(error)}") from None
    if node is None:
        raise ConfigError(f"{source}: is empty; the least is 'version: 1'")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source}: line 1: must be a mapping such as 'version: 1'")
    lines = dict(_node_lines(node, ()))
    mistakes = [*_duplicate_keys(node, (), frozenset())]
    try:
        content = _Loader("").construct_document(node)
        document = json.dumps(content)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {_yaml_complaint(error)}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not valid: {error}") from None
    try:
        settings = Settings.model_validate_json(document, strict=True)
    except ValidationError as error:
        mistakes += [_mistake(details, lines) for details in error.errors(include_url=False)]
    else:
        if not mistakes:
            return settings
    mistakes.sort()
    listed = "".join(f"\n  line {line}: {message}" for line, message in mistakes)
    count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
    raise ConfigError(f"{source}: {count}{listed}")


def settings_schema() -> dict[str, Any]:
    """The JSON Schema of policy files, for editors."""
    schema = Settings.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "AutoSpec policy file"
    return schema


def _yaml_complaint(error: yaml.YAMLError) -> str:
    mark: yaml.Mark | None = getattr(error, "problem_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return f"not valid YAML: {error}"
    detail = ", ".join(part for part in (error.context, error.problem) if part)
    return f"line {mark.line + 1}, column {mark.column + 1}: not valid YAML: {detail}"


class _Loader(yaml.SafeLoader):
    """Safe YAML 1.2 scalars: ``off`` is a policy's name and ``1e-3`` a number, dates are text."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, expression)
        for tag, expression in resolvers
        if tag in {"tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"}
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


def _children(node: yaml.Node, place: Location) -> Iterator[tuple[Location, int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*place, str(key.value)), key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*place, index), value.start_mark.line + 1, value


def _node_lines(node: yaml.Node, place: Location) -> Iterator[tuple[Location, int]]:
    yield place, node.start_mark.line + 1
    if len(place) > 16:  # deeper than any setting: an alias that contains itself
        return
    for inner, line, value in _children(node, place):
        yield from _node_lines(value, inner)
        yield inner, line


def _duplicate_keys(
    node: yaml.Node, place: Location, above: frozenset[int]
) -> Iterator[tuple[int, str]]:
    if id(node) in above:
        return
    seen: dict[Location, int] = {}
    for inner, line, value in _children(node, place):
        if inner in seen and inner[-1] != "<<":
            yield line, f"{_key(inner)}: given twice, first in line {seen[inner]}; keep one"
        seen.setdefault(inner, line)
        yield from _duplicate_keys(value, inner, above | {id(node)})


def _mistake(details: ErrorDetails, lines: Mapping[Location, int]) -> tuple[int, str]:
    place = details["loc"]
    tag: str | None = None
    if len(place) > 1 and place[0] == "policy" and place[1] in _option_classes():
        tag, place = str(place[1]), ("policy", *place[2:])  # pydantic puts the union's tag there
    if details["type"] == "union_tag_invalid":
        place = (*place, "name")
    known = place
    while known and known not in lines:
        known = known[:-1]
    return lines.get(known, 1), f"{_key(place)}: {_complaint(details, place, tag)}"


def _complaint(details: ErrorDetails, place: Location, tag: str | None) -> str:
    kind, found = details["type"], details["input"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key" + _allowed(_keys_at(place[:-1], tag), str(place[-1]))
    if kind == "missing":
        return "is missing"
    if kind == "union_tag_not_found":
        return f"needs a name{_allowed(policy_names(), None)}"
    if kind == "union_tag_invalid":
        name = str(context["tag"])
        return f"unknown policy {name!r}{_allowed(policy_names(), name)}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
        return f"found {_shown(found)}{_allowed(choices, str(found))}"
    if kind == "value_error":
        return f"found {_shown(found)}: {context['error']}"
    return f"{_rule(details, place)}, found {_shown(found)}"


def _rule(details: ErrorDetails, place: Location) -> str:
    """What pydantic asks for, in the words of YAML."""
    kind = details["type"]
    if kind in {"model_attributes_type", "model_type", "dict_type"}:
        example = " with a name, such as {name: off}" if place == ("policy",) else ""
        return f"must be a mapping{example}"
    if kind == "tuple_type":
        return "must be a list"
    if kind == "too_short":
        return f"needs at least {details['ctx']['min_length']} of them"
    text = details["msg"].replace("Input should be", "must be")
    return f"{text[:1].lower()}{text[1:]}"


def _keys_at(place: Location, tag: str | None) -> tuple[str, ...]:
    model: type[BaseModel] = Settings
    for part in place:
        if isinstance(part, int):
            continue
        if part == "policy" and model is Settings and tag is not None:
            model = _option_classes()[tag]
        else:
            model = _section(model.model_fields[part].annotation) or model
    return tuple(model.model_fields)


def _section(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _section(argument)
        if found is not None:
            return found
    return None


def _allowed(names: tuple[str, ...] | list[str], found: str | None) -> str:
    nearest = difflib.get_close_matches(found, names, n=1, cutoff=0.4) if found is not None else []
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"; allowed: {', '.join(names)}{hint}"


def _key(place: Location) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.lstrip(".") or "policy file"


def _shown(value: object) -> str:
    if value is None:
        return "null"
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
