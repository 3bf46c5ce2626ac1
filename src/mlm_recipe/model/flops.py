"""FLOPs and parameters of a RoBERTa masked LM, counted from its geometry.

Only matrix multiplications count, the convention of model FLOPs utilisation (PaLM, appendix B),
and only work that is done: the head runs at masked positions.
"""


def forward_flops_per_token(
    *,
    hidden_dim: int,
    intermediate_dim: int,
    num_layers: int,
    context_length: int,
    vocab_columns: int,
    masked_fraction: float,
) -> float:
    """Forward FLOPs per token of a row; forward and backward together are three times as many.

    Args:
        context_length: positions each token attends over (padding and other documents of the
            row included: their scores are computed, then masked).
        vocab_columns: columns of the decoder that are computed, padding columns included.
        masked_fraction: size of the ``masked`` axis over size of the ``position`` axis.
    """
    projections = 4 * hidden_dim * hidden_dim
    feed_forward = 2 * hidden_dim * intermediate_dim
    attention = 2 * context_length * hidden_dim
    head = hidden_dim * hidden_dim + hidden_dim * vocab_columns
    multiply_adds = num_layers * (projections + feed_forward + attention) + masked_fraction * head
    return 2.0 * multiply_adds


def parameter_count(
    *,
    hidden_dim: int,
    intermediate_dim: int,
    num_layers: int,
    vocab_size: int,
    position_rows: int,
    type_vocab_size: int,
) -> int:
    """Parameters of the model as exported: decoder tied, padding columns left out."""
    norm = 2 * hidden_dim
    tables = (vocab_size + position_rows + type_vocab_size) * hidden_dim + norm
    attention = 4 * hidden_dim * (hidden_dim + 1) + norm
    feed_forward = 2 * hidden_dim * intermediate_dim + intermediate_dim + hidden_dim + norm
    head = hidden_dim * (hidden_dim + 1) + norm + vocab_size
    return tables + num_layers * (attention + feed_forward) + head
