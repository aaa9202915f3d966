import pytest

from tests.conftest import random_llama
from tests.evals.conftest import byte_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A random model with a window of 512 bytes, on disk as a user's checkpoint would be."""
    path = tmp_path_factory.mktemp("models") / "random"
    random_llama(vocab_size=258, max_position_embeddings=512, initializer_range=0.1).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Five documents, one of them too short for 1,024 tokens."""
    path = tmp_path_factory.mktemp("data")
    for i in range(4):
        (path / f"{i}.txt").write_text(f"document {i} says its own number again: {i}; " * 60)
    (path / "short.txt").write_text("short")
    return path


@pytest.fixture
def recipe(checkpoint, data):
    return {
        "model": str(checkpoint),
        "methods": ["unscaled", "yarn", "linear"],
        "context": 1024,
        "lengths": [512, 1024],
        "data": str(data),
        "perplexity": {"documents": 3},
        "passkey": {"depths": [0, 1], "trials": 2},
    }
