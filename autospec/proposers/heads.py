"""Which proposer a head's folder makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autospec.engine.drafting import ModelProposer
from autospec.engine.model import CausalModel
from autospec.errors import ModelError
from autospec.proposers.checkpoint import CONFIG, Checkpoint
from autospec.proposers.eagle import EagleProposer
from autospec.proposers.eagle_files import read_eagle_layout
from autospec.proposers.medusa import MedusaProposer
from autospec.proposers.mlp_speculator import MlpSpeculatorProposer

HEAD_KINDS = ("mlp_speculator", "medusa", "eagle", "eagle3")
"""Names of the proposers that heads make, as vLLM calls its methods."""

_EAGLE_MAX_K = 5


def head_kind(folder: str | Path) -> str:
    """The proposer's name, from the configuration and the names of the tensors alone.

    Raises ModelError for a folder that holds no known head.
    """
    checkpoint = Checkpoint.open(folder)
    said = [checkpoint.config.get("model_type"), *(checkpoint.config.get("architectures") or [])]
    told = " ".join(str(each) for each in said).lower()
    if "mlp_speculator" in told or "mlpspeculator" in told:
        return "mlp_speculator"
    if "medusa" in told or "medusa_num_heads" in checkpoint.config:
        return "medusa"
    if "speculators_model_type" in checkpoint.config or "midlayer.hidden_norm.weight" in (
        checkpoint.names
    ):
        return "eagle3"
    if "fc.weight" in checkpoint.names:
        return "eagle"
    raise ModelError(
        f"{checkpoint.folder / CONFIG}: this is no head that is known; "
        f"there are {', '.join(HEAD_KINDS)}"
    )


def head_bytes(folder: str | Path) -> int:
    """Bytes of a head's weights as stored, before any is loaded."""
    return Checkpoint.open(folder).memory_bytes()


def head_state_bytes(folder: str | Path, target: CausalModel, slots: int, capacity: int) -> int:
    """Bytes that drafting with a head keeps beside its weights, before any is loaded."""
    if head_kind(folder) in ("eagle", "eagle3"):
        return read_eagle_layout(folder, target).state_bytes(slots, capacity, target.dtype)
    return slots * target.hidden_size * target.dtype.itemsize  # the last state of each request


def load_head(folder: str | Path, target: CausalModel, max_k: int | None = None) -> ModelProposer:
    """The proposer of a head; ``max_k`` None takes what it was made for. Raises ModelError."""
    makers: dict[str, Callable[[], ModelProposer]] = {
        "mlp_speculator": lambda: MlpSpeculatorProposer.load(folder, max_k=max_k),
        "medusa": lambda: MedusaProposer.load(folder, max_k=max_k),
        "eagle": lambda: EagleProposer.load(folder, target, max_k=max_k or _EAGLE_MAX_K),
        "eagle3": lambda: EagleProposer.load(folder, target, max_k=max_k or _EAGLE_MAX_K),
    }
    return makers[head_kind(folder)]()
