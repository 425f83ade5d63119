"""Text of generated tokens: incremental detokenization and stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphtrain.data.tokenizers.byte import ByteTokenizer
from graphtrain.run.serving.detokenizer import IncrementalDetokenizer
from graphtrain.run.serving.engine_protocol import SamplingParameters, TokenChoice
from graphtrain.run.serving.sequence import GeneratedText, SequenceRequest
from graphtrain.run.serving.stop_strings import StopStrings

BYTES = ByteTokenizer()


def pushed(decode, prompt, tokens):
    detokenizer = IncrementalDetokenizer(decode, prompt)
    return [detokenizer.push(token) for token in tokens] + [detokenizer.finish()]


@given(st.text())
def test_pieces_of_a_text_are_the_text_and_no_piece_cuts_a_character(text):
    pieces = pushed(BYTES.decode, [], text.replace("\ufffd", "").encode())
    assert "".join(pieces) == text.replace("\ufffd", "")
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_text_become_what_the_decoder_makes_of_them(data):
    assert "".join(pushed(BYTES.decode, b"a:", data)) == data.decode(errors="replace")


def test_text_that_is_complete_is_not_held_back():
    assert pushed(BYTES.decode, [], "aé€".encode()) == ["a", "", "é", "", "", "€", ""]


def test_a_long_run_of_broken_bytes_is_released_with_a_delay_of_at_most_a_character():
    detokenizer = IncrementalDetokenizer(BYTES.decode, [])
    released = sum(len(detokenizer.push(0x80)) for _ in range(500))
    assert released >= 497


def test_the_space_before_a_word_of_sentencepiece_is_not_lost(tmp_path):
    from graphtrain.data.tokenizers.train_sentencepiece import train_sentencepiece

    tokenizer = train_sentencepiece(["the cat sat on the mat, 中 the end"] * 50, 300)
    prompt, answer = tokenizer.encode("the cat"), tokenizer.encode(" sat on the mat, 中文😀 end")
    pieces = pushed(tokenizer.decode, prompt, answer)
    assert "".join(pieces) == " sat on the mat, 中文😀 end"


def test_byte_level_bpe_gives_characters_of_several_tokens_at_once():
    from graphtrain.data.tokenizers.huggingface import train_bpe

    tokenizer = train_bpe(["the cat sat on the mat"] * 50, 300)
    text = "the 中文😀 cat"
    assert "".join(pushed(tokenizer.decode, [], tokenizer.encode(text))) == text


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["abc", "def"], ["cd"], "ab"),
        (["a", "\n", "\n", "b"], ["\n\n"], "a"),
        (["xx", "xy", "z"], ["xxy"], "x"),
        (["one two"], ["two", "one t"], ""),
        (["ab", "c"], ["abd"], "abc"),
    ],
)
def test_a_text_ends_before_the_first_stop_string_wherever_tokens_cut_it(pieces, stop, text):
    stops, released = StopStrings(stop), ""
    for piece in pieces:
        part, is_stopped = stops.push(piece)
        released += part
        if is_stopped:
            break
    assert released + ("" if is_stopped else stops.finish()) == text


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_of_a_text_are_those_of_its_characters(text, strings):
    stops, released, is_stopped = StopStrings(strings), "", False
    for character in text:
        part, is_stopped = stops.push(character)
        released += part
        if is_stopped:
            break
    expected = min((text.find(stop) for stop in strings if stop in text), default=len(text))
    if not is_stopped:
        assert released + stops.finish() == text[:expected]
    else:  # of two that overlap, the one that is complete first ends the text
        assert not any(stop in released for stop in strings)


def generated(tokens, stop=(), stop_tokens=()):
    sampling = SamplingParameters(stop_tokens=stop_tokens)
    request = SequenceRequest(prompt=(1,), sampling=sampling, stop=stop)
    text = GeneratedText(request, BYTES.decode)
    first = text.push([TokenChoice(token, 0.0) for token in tokens])
    rest = text.finish()
    tokens = [token.choice.token for token in first[1] + rest[1]]
    return first[0] + rest[0], bytes(tokens), text.is_stopped


def test_tokens_of_a_stop_string_are_dropped_with_its_text():
    assert generated(b"ab--cd", stop=("--",)) == ("ab", b"ab", True)
    assert generated(b"ab-", stop=("--",)) == ("ab-", b"ab-", False)


def test_a_stop_token_ends_the_text_and_is_no_part_of_it():
    assert generated([97, 98, 7, 99], stop_tokens=(7,)) == ("ab", b"ab", True)
    assert generated([97, 0xC3, 7], stop_tokens=(7,)) == ("a\ufffd", b"a\xc3", True)


def test_the_stop_token_is_kept_apart_unless_a_string_ended_the_text_before_it():
    request = SequenceRequest(
        prompt=(1,), sampling=SamplingParameters(stop_tokens=(7,)), stop=("--",)
    )
    for tokens, stop_token in (([97, 98, 7, 99], (7, 2)), (b"ab--\x07", None), (b"ab", None)):
        text = GeneratedText(request, BYTES.decode)
        text.push([TokenChoice(token, 0.0) for token in tokens])
        text.finish()
        found = text.stop_token and (text.stop_token.choice.token, text.stop_token.offset)
        assert found == stop_token


def test_a_token_begins_after_parts_of_characters_that_are_none():
    text = GeneratedText(SequenceRequest(prompt=(1,), sampling=SamplingParameters()), BYTES.decode)
    added, tokens = text.push([TokenChoice(token, 0.0) for token in b"a\xe6\x97bc"])
    assert added == "a\ufffdbc"
    assert [token.offset for token in tokens] == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", ["\n\n", "c", "ab", "e. T", "zzz"])
def test_the_tokens_of_a_text_are_its_text_also_where_a_stop_string_cuts_one(size, stop):
    """Here a token is some characters; the last one is shown as far as the text goes."""
    story = "One abc.\n\nThe tale. The end."
    pieces = [story[at : at + size] for at in range(0, len(story), size)]
    request = SequenceRequest(prompt=(0,), sampling=SamplingParameters(), stop=(stop,))
    text = GeneratedText(request, lambda tokens: "".join(pieces[token] for token in tokens))
    updates = []
    for token in range(1, len(pieces)):
        if not text.is_stopped:
            updates.append(text.push([TokenChoice(token, -1.0)]))
    updates.append(text.finish())
    whole, shown = "".join(pieces[1:]).partition(stop)[0], ""
    for _, tokens in updates:
        for token in tokens:
            assert token.offset == len(shown)
            shown += pieces[token.choice.token] if token.cut_text is None else token.cut_text
    assert shown == "".join(released for released, _ in updates) == whole
