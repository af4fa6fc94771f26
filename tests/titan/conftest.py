from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import harness


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torchtitan") is None:
        absent = pytest.mark.skip(reason="torchtitan is not installed: make test-titan has an environment for it")
        for item in items:
            if "tests/titan/" in item.nodeid and "test_titan_versions" not in item.nodeid:
                item.add_marker(absent)


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what torchtitan's debug configurations look for below the current one: a tokenizer, and texts
    and conversations that are made up. They come with its sources, not with its wheel."""
    root = tmp_path_factory.mktemp("titan")
    source = root / "tests" / "assets"
    _write_tokenizer(source / "tokenizer")
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 8))) for _ in range(200)]

    def text(most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    _write_lines(source / "c4_test", [{"text": text(80)} for _ in range(200)])
    _write_lines(source / "sft_test", [{"question": text(6), "answer": text(12)} for _ in range(100)])
    return root


def _write_tokenizer(directory: Path) -> None:
    """One token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _write_lines(directory: Path, entries: list[dict[str, str]]) -> None:
    directory.mkdir(parents=True)
    (directory / "data.json").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture(scope="module")
def here(assets: Path) -> Iterator[Path]:
    """The assets' directory as the current one, without a network and with caches of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(assets)
        for name, value in {
            "HF_HOME": str(assets / "cache"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
            # Compiling FlexAttention's mask for a CPU takes a minute; the tests' own attention needs no compiler.
            "TORCHDYNAMO_DISABLE": "1",
            # As docs/torchtitan.md has it: what torchtitan imports is paid for once.
            "PLANARIA_PRELOAD": "torch,torch.optim,torch.distributed,torch._dynamo,planaria.torch,datasets,wandb,tyro",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }.items():
            patch.setenv(name, value)
        # A start takes as long as other tests' whole jobs.
        patch.setattr(harness, "PATIENCE", 3 * harness.PATIENCE)
        yield assets
