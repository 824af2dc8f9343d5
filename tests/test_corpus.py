"""The data of a run: which files, split how, as which numbers, and that no token is lost or predicted twice."""

from __future__ import annotations

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from naught.config.resolving import parse_override, resolve
from naught.errors import UsageError
from naught.trainer.corpus import open_corpus, prepare_corpus, refuse_strange, yardsticks
from naught.trainer.texts import Text, Texts, find_texts, share_out, stdlib_texts
from naught.trainer.tokens import Part, encoder_of, map_tokens, write_tokens
from naught.trainer.windows import Windows, shares


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("NAUGHT_CACHE", str(tmp_path / "cache"))


def recipe(*words: str):
    return resolve(None, [parse_override(word) for word in words]).recipe


def corpus_of(*words: str):
    asked = recipe(*words)
    return open_corpus(asked, prepare_corpus(asked))


def test_the_standard_library_is_split_by_file_and_is_real_text():
    texts = stdlib_texts()
    assert {"argparse.py", "json/decoder.py"} <= {text.name for text in texts.files}
    assert not [text for text in texts.files if "test" in text.name.split("/") or "site-packages" in text.name]
    train, aside = share_out(texts, 0.05)
    assert sorted([*train, *aside], key=lambda text: text.name) == sorted(texts.files, key=lambda text: text.name)
    sizes = [sum(text.path.stat().st_size for text in part) for part in (train, aside)]
    assert sizes[1] / sum(sizes) == pytest.approx(0.05, abs=0.002)


def test_which_files_are_set_aside_depends_on_names_not_on_places(tmp_path):
    for root in ("one", "other"):
        for at in range(40):
            file = tmp_path / root / f"sub{at % 3}" / f"{at}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("x" * 100)
    one, other = (share_out(find_texts(str(tmp_path / root)), 0.25)[1] for root in ("one", "other"))
    assert [text.name for text in one] == [text.name for text in other]
    assert len(one) == 10


def test_a_file_a_folder_and_a_glob_are_found_and_hidden_files_are_not(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.md").write_text("b")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.txt").write_text("c")
    assert [text.name for text in find_texts(str(tmp_path / "a.txt")).files] == ["a.txt"]
    assert [text.name for text in find_texts(str(tmp_path)).files] == ["a.txt", "b.md"]
    assert [text.path.name for text in find_texts(str(tmp_path / "*.txt")).files] == ["a.txt"]


def test_data_that_is_not_there_is_told_in_a_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for pattern, said in ((tmp_path / "absent", "there is no file"), (tmp_path / "empty", "holds no files")):
        with pytest.raises(UsageError, match=said):
            find_texts(str(pattern))


def test_a_single_file_is_cut_and_no_byte_is_lost(tmp_path):
    text = "".join(f"line {at}\n" for at in range(2000)).encode()
    (tmp_path / "one.txt").write_bytes(text)
    corpus = corpus_of(f"data={tmp_path / 'one.txt'}", "validation=0.1")
    train, aside = bytes(corpus.train), bytes(corpus.validation)
    assert len(aside) == int(len(text) * 0.1)
    assert aside == text[-len(aside) :]
    assert train == text[: -len(aside)] + b"\n", "a part ends as a file does: with a line"
    assert corpus.vocab == 256
    assert corpus.bytes_per_token == 1.0


def test_a_file_larger_than_a_piece_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("naught.trainer.tokens._PIECE_BYTES", 64)
    text = b"".join(b"%d\n" % at for at in range(500))
    (tmp_path / "t").write_bytes(text)
    write_tokens([Part(Text("t", tmp_path / "t"), 0, len(text))], encoder_of("bytes"), tmp_path, "all")
    assert bytes(map_tokens(tmp_path / "all.npy")) == text


def test_files_are_encoded_once_and_anew_when_one_changes(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("first\n" * 100)
    first = prepare_corpus(recipe(f"data={file}"))
    made = (first / "train.npy").stat().st_mtime_ns
    assert prepare_corpus(recipe(f"data={file}")) == first
    assert (first / "train.npy").stat().st_mtime_ns == made
    file.write_text("other words\n" * 100)
    assert prepare_corpus(recipe(f"data={file}")) != first


def test_token_numbers_are_mapped_as_they_are(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(1000, dtype=np.uint16))
    corpus = corpus_of(f"data={tmp_path / 'ids.npy'}", "validation=0.1")
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.tolist() == list(range(900))
    assert corpus.validation.tolist() == list(range(900, 1000))
    assert corpus.bytes_per_token == 0.0, "nobody knows"


@pytest.mark.parametrize(
    ("array", "said"),
    [(np.zeros((2, 2), dtype=np.int64), "not a row of whole numbers"), (np.zeros(4), "holds float64"), (None, "cannot be read")],
)
def test_a_file_that_holds_no_token_numbers_is_refused(tmp_path, array, said):
    path = tmp_path / "ids.npy"
    path.write_bytes(b"nonsense") if array is None else np.save(path, array)
    with pytest.raises(UsageError, match=said):
        corpus_of(f"data={path}")


@pytest.mark.parametrize(("numbers", "said"), [([0, 300], "the token 300"), ([-1, 2], "the token -1")])
def test_tokens_that_a_model_does_not_know_are_found_before_training(tmp_path, numbers, said):
    np.save(tmp_path / "ids.npy", np.array(numbers * 50, dtype=np.int32))
    with pytest.raises(UsageError, match=said):
        refuse_strange(corpus_of(f"data={tmp_path / 'ids.npy'}"), 256)


def test_text_and_token_numbers_are_not_mixed(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(1000, dtype=np.uint16))
    with pytest.raises(UsageError, match="the other is text"):
        corpus_of(f"data={tmp_path / 'x.txt'}", f"validation_path={tmp_path / 'ids.npy'}")


def test_pickles_are_never_loaded(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UsageError, match="cannot be read"):
        corpus_of(f"data={tmp_path / 'ids.npy'}")


def test_yardsticks_are_those_of_information_theory():
    found = yardsticks(bytes(range(256)) * 64)
    assert found["order-0 entropy"] == pytest.approx(8.0)
    assert found["zlib -9"] < 1.0
    assert yardsticks(b"aaaa")["order-0 entropy"] == pytest.approx(0.0)
    assert yardsticks(b"") == {}


@pytest.mark.parametrize("seq", [2, 3, 7, 50])
def test_each_token_but_the_first_is_predicted_once(seq):
    windows = Windows(np.arange(50, dtype=np.uint8), seq)
    predicted = [int(token) for at in range(len(windows)) for token in windows[at][1:]]
    assert predicted == list(range(1, 1 + len(predicted)))
    assert len(predicted) > 49 - seq + 1


@pytest.mark.parametrize(("numel", "seq", "said"), [(10, 1, "at least 2 tokens"), (5, 8, "too few for one sample of 8")])
def test_too_little_data_is_told(numel, seq, said):
    with pytest.raises(UsageError, match=said):
        Windows(np.zeros(numel, dtype=np.uint8), seq)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 5, 12, 13])
def test_ranks_share_an_evaluation_without_loss_and_take_as_many_forwards(world, rows):
    windows = Windows(np.arange(rows + 1, dtype=np.uint8), 2)
    taken = [list(shares(windows, 4, rank=rank, world=world, most=0)) for rank in range(world)]
    assert len({len(turns) for turns in taken}) == 1
    firsts = sorted(int(row[0]) for turns in taken for share in turns for row in share.rows[: share.counted])
    assert firsts == list(range(rows))
    assert all(share.rows.dtype == torch.int64 and len(share.rows) > 0 for turns in taken for share in turns)


def test_an_evaluation_can_be_cut_short():
    windows = Windows(np.arange(101, dtype=np.uint8), 2)
    assert len(list(shares(windows, 5, rank=0, world=2, most=3))) == 3


@pytest.mark.skipif(find_spec("tokenizers") is None, reason="needs the extra hf")
def test_a_hugging_face_tokenizer_makes_numbers_and_ends_of_files(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.txt").write_text("a b zzz\n")
    encoder = encoder_of(str(tmp_path))
    write_tokens([Part(Text("x", tmp_path / "x.txt"), 0, 8)], encoder, tmp_path, "all")
    assert map_tokens(tmp_path / "all.npy").tolist() == [1, 2, 0, 3]
    assert math.log2(encoder.vocab) == 2


def test_a_tokenizer_that_is_not_there_is_told():
    with pytest.raises(UsageError, match='there is no tokenizer "absent"'):
        encoder_of("absent")


def test_texts_of_no_files_are_not_shared_out():
    assert share_out(Texts("none", ()), 0.5) == ([], [])
