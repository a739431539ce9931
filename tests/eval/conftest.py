"""The tokenizer that prompts are made with."""

import pytest

from checkpoints_convert import open_checkpoint
from tests.conftest import packaged
from uniprefill_jax.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(open_checkpoint(packaged("smollm2-135m")))
    assert found is not None
    return found
