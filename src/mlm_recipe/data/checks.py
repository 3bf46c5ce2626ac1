"""What makes a data configuration impossible, checked without importing jax."""

from mlm_recipe.errors import ConfigError

STOP_STRATEGIES = ("restart", "all_exhausted")


def check_stop_strategy(value: str) -> None:
    """Raises ConfigError unless the mixture can be read to its end under this strategy.

    Levanter's ``first_exhausted`` permutes its last, partial block beyond the end of the data and
    dies there with an IndexError, batches before the end.
    """
    if value not in STOP_STRATEGIES:
        problem = "there is no such strategy"
        if value == "first_exhausted":
            problem = "its last rows cannot be read (Levanter asks for rows beyond the end)"
        raise ConfigError(
            "data.stop_strategy",
            value,
            problem,
            "use restart (endless) or all_exhausted (ends when every component was seen)",
        )
