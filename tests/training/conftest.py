"""What the tests of the training share."""

import pytest

from training.documents import Pieces
from training.vocabulary import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    """The trained model's tokenizer."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def pieces(tokenizer):
    """Tokenised parts of documents."""
    return Pieces(tokenizer)
