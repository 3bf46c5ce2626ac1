"""TokenizerInfo, and the shipped tokenizer as transformers and Levanter see it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mlm_recipe.data.tokenizer import TokenizerInfo
from mlm_recipe.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "corpus" / "austen" / "tokenizer"


def save(directory: Path, tokenizer: Tokenizer, **config: object) -> str:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


def word_piece(*specials: str) -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*specials, "the", "##y", "sea"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def test_shipped_tokenizer_has_robertas_special_ids():
    info = TokenizerInfo.load(str(SHIPPED))
    assert (info.bos_id, info.pad_id, info.eos_id, info.unk_id) == (0, 1, 2, 3)
    assert info.mask_id == 4095 == info.vocab_size - 1
    assert info.special_ids == (0, 1, 2, 3, 4095)
    np.testing.assert_array_equal(info.random_ids, np.arange(4, 4095))
    assert info.random_ids.dtype == np.int32
    assert info.directory == SHIPPED


def test_transformers_loads_the_shipped_tokenizer():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED, local_files_only=True)
    assert tokenizer.mask_token_id == 4095 and len(tokenizer) == 4096
    assert (tokenizer.bos_token_id, tokenizer.cls_token_id) == (0, 0)
    assert (tokenizer.eos_token_id, tokenizer.sep_token_id) == (2, 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (1, 3)
    encoded = tokenizer("It is a <mask> truth")
    # <mask> takes the space before it along: no lone space token in front.
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == (
        ["<s>", "It", "\u0120is", "\u0120a", "<mask>", "\u0120truth", "</s>"]
    )
    assert set(encoded) == {"input_ids", "attention_mask"}


def test_levanter_loads_the_shipped_tokenizer():
    from levanter.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(str(SHIPPED))
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.convert_tokens_to_ids("<mask>") == 4095
    assert tokenizer.vocab_size == 4096


def test_bert_tokenizers_use_cls_and_sep(tmp_path):
    tokenizer = word_piece("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    info = TokenizerInfo.load(save(tmp_path / "bert", tokenizer))
    assert (info.pad_id, info.unk_id, info.bos_id, info.eos_id, info.mask_id) == (0, 1, 2, 3, 4)
    assert info.random_ids.tolist() == [5, 6, 7]


def test_named_roles_win_over_conventional_texts(tmp_path):
    tokenizer = word_piece("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<blank>")
    config = {"mask_token": {"content": "<blank>", "lstrip": True}}
    assert TokenizerInfo.load(save(tmp_path / "named", tokenizer, **config)).mask_id == 5


def test_roles_are_found_when_the_config_names_none(tmp_path):
    """As in the files of roberta-base, where only model_max_length is set."""
    shutil.copytree(SHIPPED, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert TokenizerInfo.load(str(tmp_path / "bare")) == TokenizerInfo(
        **{**vars(TokenizerInfo.load(str(SHIPPED))), "name": str(tmp_path / "bare")}
        | {"directory": tmp_path / "bare"}
    )


def test_added_words_are_random_ids_and_holes_are_not(tmp_path):
    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "the": 5, "sea": 9}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(vocab)[:5])
    tokenizer.add_tokens(["Pemberley"])
    tokenizer.add_special_tokens([AddedToken("<ctrl>", special=True)])
    info = TokenizerInfo.load(save(tmp_path / "added", tokenizer))
    by_name = {text: tokenizer.token_to_id(text) for text in ("the", "sea", "Pemberley")}
    assert info.random_ids.tolist() == sorted(by_name.values())
    assert info.special_ids == (0, 1, 2, 3, 4, tokenizer.token_to_id("<ctrl>"))
    assert info.vocab_size == max(9, *tokenizer.get_vocab().values()) + 1


def test_digest_is_of_the_content(tmp_path):
    shutil.copytree(SHIPPED, tmp_path / "copy")
    digest = TokenizerInfo.load(str(SHIPPED)).digest
    assert TokenizerInfo.load(str(tmp_path / "copy")).digest == digest
    file = tmp_path / "copy" / "tokenizer.json"
    file.write_text(file.read_text().replace('"add_prefix_space":false', '"add_prefix_space":true'))
    assert TokenizerInfo.load(str(tmp_path / "copy")).digest != digest


def test_documents_are_not_truncated_and_hold_no_control_tokens(tmp_path):
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    info = TokenizerInfo.load(save(tmp_path / "cut", tokenizer))
    text = "It is a <mask> truth universally acknowledged </s> that a single man"
    ids = info.document_tokenizer().encode(text, add_special_tokens=False).ids
    assert len(ids) > 8
    assert not set(ids) & set(info.special_ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "specials, missing",
    [
        (("[PAD]", "[UNK]", "[CLS]", "[SEP]"), "mask"),
        (("[UNK]", "[CLS]", "[SEP]", "[MASK]"), "pad"),
        (("[PAD]", "[UNK]", "[SEP]", "[MASK]"), "bos"),
        (("[PAD]", "[UNK]", "[CLS]", "[MASK]"), "eos"),
    ],
)
def test_a_tokenizer_that_lacks_a_role_is_refused(tmp_path, specials, missing):
    directory = save(tmp_path / "lacking", word_piece(*specials))
    with pytest.raises(ConfigError, match=f"no token for: {missing} ") as error:
        TokenizerInfo.load(directory)
    assert error.value.field == "data.tokenizer" and error.value.value == directory


def test_unusable_names_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": "1.0"')
    cases = {
        "": "no tokenizer is given",
        str(tmp_path / "absent"): "no such directory",
        str(tmp_path / "empty"): "no tokenizer.json",
        str(tmp_path / "broken"): "not valid JSON",
    }
    for name, problem in cases.items():
        with pytest.raises(ConfigError, match=problem):
            TokenizerInfo.load(name)


def test_checks_of_a_launcher_need_no_jax():
    code = (
        "import sys, mlm_recipe.data.tokenizer, mlm_recipe.data.sources, mlm_recipe.data.packing\n"
        f"mlm_recipe.data.tokenizer.TokenizerInfo.load({str(SHIPPED)!r})\n"
        "heavy = {'jax', 'levanter', 'haliax', 'equinox', 'transformers', 'pyarrow'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
