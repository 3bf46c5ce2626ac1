"""Do tokenizer and model belong together? Asked by the launcher and again when a run is built."""

from mlm_recipe.data.tokenizer import TokenizerInfo
from mlm_recipe.errors import ConfigError


def check_fit(tokenizer: TokenizerInfo, *, vocab_size: int | None, pad_token_id: int) -> None:
    """The model has a row for every token and agrees on which one is padding.

    Args:
        tokenizer: The tokenizer.
        vocab_size: ``model.vocab_size``; None takes the tokenizer's.
        pad_token_id: ``model.pad_token_id``.

    Raises:
        ConfigError: it has not, or does not.
    """
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "model.vocab_size",
            vocab_size,
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens",
            f"set it to {tokenizer.vocab_size} or more, or leave it out",
        )
    if tokenizer.pad_id != pad_token_id:
        raise ConfigError(
            "model.pad_token_id",
            pad_token_id,
            f"padding is token {tokenizer.pad_id} in the tokenizer {tokenizer.name}",
            f"set it to {tokenizer.pad_id}",
        )
