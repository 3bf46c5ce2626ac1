"""Turn a folder of .txt files into ``train.jsonl.gz`` and ``validation.jsonl.gz``.

    python scripts/prepare_corpus.py novels/ --output corpus/novels --text-unit paragraph

One JSON object a line, with the file's ``name`` and the ``text`` of one document, unwrapped to one
line a paragraph. Every tenth document is kept for validation. The same files give the same bytes.
"""

import argparse
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from mlm_recipe.data.readers import TextUnit
from mlm_recipe.data.sources import DocumentFiles


def read_folder(folder: Path, text_unit: TextUnit) -> Iterator[dict[str, str]]:
    """``{"name", "text"}`` for each document of each .txt file, files in the order of their names.

    Raises ConfigError when there is no file, DataError for text that is not UTF-8.
    """
    pattern = str(folder / "**" / "*.txt")
    files = DocumentFiles.resolve([pattern], field="folder", text_unit=text_unit)
    for url in files.shard_names:
        for document in files.open_shard_at_row(url, 0):
            paragraphs = re.split(r"\n\s*\n", document["text"])
            lines = (" ".join(paragraph.split()) for paragraph in paragraphs)
            text = "\n".join(line for line in lines if line)
            if text:
                yield {"name": Path(url).stem, "text": text}


def write_documents(path: Path, documents: Iterable[dict[str, str]]) -> int:
    """Write gzipped JSON lines without a time stamp; returns how many."""
    count = 0
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for document in documents:
            file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
            count += 1
    return count


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="searched for .txt files, subfolders too")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--text-unit",
        choices=get_args(TextUnit),
        default="file",
        help="what one document is",
    )
    parser.add_argument(
        "--validation-every", type=int, default=10, help="hold out every n-th document; 2 or more"
    )
    args = parser.parse_args(argv)
    if args.validation_every < 2:
        parser.error("--validation-every must be at least 2")
    documents = list(read_folder(args.folder, args.text_unit))
    every = args.validation_every
    held_out = set(range(every - 1, len(documents), every))
    args.output.mkdir(parents=True, exist_ok=True)
    for name, validation in (("train", False), ("validation", True)):
        chosen = (d for i, d in enumerate(documents) if (i in held_out) is validation)
        write_documents(args.output / f"{name}.jsonl.gz", chosen)


if __name__ == "__main__":
    main()
