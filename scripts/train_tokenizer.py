"""Train the byte-level BPE tokenizer that ships with a corpus.

    python scripts/train_tokenizer.py corpus/austen/train.jsonl.gz --output corpus/austen/tokenizer

The tokenizer is RoBERTa's kind: bytes as the alphabet, ``<s> <pad> </s> <unk>`` as ids 0-3, and
``<mask>`` as the last id, swallowing the space to its left so that no lone space token precedes
it. The same input gives the same bytes, on any number of threads.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mlm_recipe.data.sources import DocumentFiles

BOS, PAD, EOS, UNK, MASK = "<s>", "<pad>", "</s>", "<unk>", "<mask>"


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on ``documents``; the result has exactly ``vocab_size`` ids, or raises ValueError."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # <mask> is added below, to be the last id
        special_tokens=[BOS, PAD, EOS, UNK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([AddedToken(MASK, lstrip=True, special=True)])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: this text supports only {tokenizer.get_vocab_size()} ids"
        )
    tokenizer.post_processor = processors.RobertaProcessing(
        sep=(EOS, tokenizer.token_to_id(EOS)),
        cls=(BOS, tokenizer.token_to_id(BOS)),
        trim_offsets=True,
        add_prefix_space=False,
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_tokens: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, which is all that loaders read."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "bos_token": BOS,
        "cls_token": BOS,
        "eos_token": EOS,
        "sep_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "mask_token": MASK,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str() + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", nargs="+", help="files, URLs or globs, read like data.*_urls")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--text-key", default="text")
    parser.add_argument(
        "--max-tokens", type=int, default=512, help="model_max_length, <s> and </s> included"
    )
    args = parser.parse_args(argv)
    files = DocumentFiles.resolve(args.documents, field="documents", text_key=args.text_key)
    texts = (document[args.text_key] for document in files)
    save_tokenizer(train_tokenizer(texts, args.vocab_size), args.output, args.max_tokens)


if __name__ == "__main__":
    main()
