"""The embedded speculative decoder, on torch and transformers."""

from __future__ import annotations

from importlib.util import find_spec

from autospec.errors import MissingDependency

for _name in ("torch", "transformers", "safetensors"):
    if find_spec(_name) is None:
        raise MissingDependency(
            f"the embedded engine needs {_name}, which is not installed: "
            'pip install "autospec-llm[engine]"'
        )
