from __future__ import annotations

from pathlib import Path

import pytest
from data_support import Characters, data_config, jsonl, task, write_jsonl

from penstock.data import PromptTemplate, load_prompts, load_train_and_eval, question_text
from penstock.errors import DataError

CHAT = "{{ messages }}"
USER = [{"role": "user", "content": "2?"}]
SYSTEM = [{"role": "system", "content": "be brief"}, *USER]


def codes(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_prompts_keep_their_row_their_place_and_their_tokens(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a", "answer": "x"}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"prompt": "b"}, {"prompt": "c"}])
    config = data_config(jsonl(one), jsonl(two))
    loaded = load_prompts(config.train, config, Characters())
    assert len(loaded) == 3
    assert [prompt.index for prompt in loaded.prompts] == [0, 1, 2]
    assert [prompt.text for prompt in loaded.prompts] == ["a", "b", "c"]
    assert [prompt.source for prompt in loaded.prompts] == [f"{one}:1", f"{two}:1", f"{two}:2"]
    assert loaded.prompts[0].row == {"prompt": "a", "answer": "x"}
    assert loaded.prompts[0].token_ids == [1, ord("a")]
    assert (loaded.skipped, loaded.questions) == ({}, {"a", "b", "c"})


def test_a_prompt_over_the_limit_is_an_error_or_is_skipped_and_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "abc"}, {"prompt": "abcd"}, {"prompt": "abcde"}])
    config = data_config(jsonl(path), max_prompt_tokens=4)
    with pytest.raises(DataError, match=r"q\.jsonl:2: the prompt has 5 tokens and data.max_prompt_tokens is 4"):
        load_prompts(config.train, config, Characters())
    config = data_config(jsonl(path), max_prompt_tokens=4, overlong_prompts="skip")
    loaded = load_prompts(config.train, config, Characters())
    assert [prompt.text for prompt in loaded.prompts] == ["abc"]
    assert loaded.skipped == {"longer than 4 tokens": 2}


def test_where_every_prompt_is_skipped_that_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "abc"}, {"prompt": "held out"}])
    config = data_config(jsonl(path), max_prompt_tokens=2, overlong_prompts="skip")
    with pytest.raises(DataError, match="no prompts are left: 1 longer than 2 tokens, 1 asked in evaluation too"):
        load_prompts(config.train, config, Characters(), exclude={"held out"})


def test_held_out_questions_are_not_trained_on_and_are_asked_once(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": p} for p in ("a", "b", " c ", "a", "d", "d")])
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": p} for p in ("c", "b", "c\n", "e")])
    config = data_config(jsonl(train), evaluation=[jsonl(held_out)])
    train_set, eval_set = load_train_and_eval(config, Characters())
    assert [prompt.text for prompt in eval_set.prompts] == ["c", "b", "e"]
    assert [prompt.index for prompt in eval_set.prompts] == [0, 1, 2]
    assert eval_set.skipped == {"asked twice": 1}
    assert [prompt.text for prompt in train_set.prompts] == ["a", "a", "d", "d"]
    assert [prompt.index for prompt in train_set.prompts] == [0, 1, 2, 3]
    assert train_set.skipped == {"asked in evaluation too": 2}


def test_the_quickstarts_questions_do_not_leak() -> None:
    options = {"min_word_len": 3, "max_word_len": 4}
    config = data_config(
        task("spell_backward", 300, 1_000_000, **options),
        evaluation=[task("spell_backward", 50, 500_000_000, **options)],
    )
    train_set, eval_set = load_train_and_eval(config, Characters())
    assert train_set.skipped["asked in evaluation too"] > 0
    assert train_set.questions.isdisjoint(eval_set.questions)
    assert len(eval_set.questions) == len(eval_set)


def test_evaluation_may_be_left_out(tmp_path: Path) -> None:
    config = data_config(jsonl(write_jsonl(tmp_path / "q.jsonl", [{"prompt": "a"}])))
    train_set, eval_set = load_train_and_eval(config, Characters())
    assert (len(train_set), len(eval_set)) == (1, 0)


def test_a_chat_template_frames_text_and_messages_alike() -> None:
    template = PromptTemplate(Characters(CHAT))
    text = "<user>2?<assistant>"
    assert template.render("2?", "w") == (text, codes(text))
    assert template.render(USER, "w") == (text, codes(text))


def test_the_system_prompt_comes_first_where_a_template_applies() -> None:
    template = PromptTemplate(Characters(CHAT), system_prompt="be brief")
    assert template.render("2?", "w")[0] == "<system>be brief<user>2?<assistant>"
    assert PromptTemplate(Characters(CHAT)).render(SYSTEM, "w")[0] == "<system>be brief<user>2?<assistant>"
    with pytest.raises(DataError, match=r"file:3: the prompt has a system message of its own"):
        template.render(SYSTEM, "file:3")


def test_without_a_template_text_is_encoded_by_the_tokenizers_own_rule() -> None:
    for template in (PromptTemplate(Characters()), PromptTemplate(Characters(CHAT), "never")):
        assert not template.uses_chat_template
        assert template.render("2?", "w") == ("2?", [1, *codes("2?")])
        with pytest.raises(DataError, match=r"file:3: the prompt is a list of chat messages, and no chat template"):
            template.render(USER, "file:3")


def test_what_the_tokenizer_cannot_do_is_refused() -> None:
    with pytest.raises(DataError, match="'require', and the model's tokenizer has no chat template"):
        PromptTemplate(Characters(), "require")
    with pytest.raises(DataError, match=r"system_prompt can't be used: the model's tokenizer has no chat template"):
        PromptTemplate(Characters(), system_prompt="be brief")
    with pytest.raises(DataError, match=r"system_prompt can't be used: data.chat_template is 'never'"):
        PromptTemplate(Characters(CHAT), "never", system_prompt="be brief")
    with pytest.raises(DataError, match="chat_template is 'always'; it must be auto, never or require"):
        PromptTemplate(Characters(), "always")
    assert PromptTemplate(Characters(CHAT), "require").uses_chat_template


def test_a_prompt_that_the_template_refuses_is_named() -> None:
    with pytest.raises(DataError, match=r"file:3: the chat template refuses the prompt: ValueError: unknown role"):
        PromptTemplate(Characters(CHAT)).render([{"role": "robot", "content": "x"}], "file:3")


def test_a_prompt_without_tokens_is_refused() -> None:
    class Deaf(Characters):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return []

    with pytest.raises(DataError, match="file:3: the prompt has no tokens"):
        PromptTemplate(Deaf()).render("x", "file:3")


def test_questions_are_compared_without_system_messages_and_white_space() -> None:
    assert question_text(" 2? ") == question_text(USER) == question_text(SYSTEM) == "2?"
    assert question_text([*USER, {"role": "assistant", "content": "4"}, *USER]) == "user: 2?\nassistant: 4\nuser: 2?"


def test_a_transformers_tokenizer_will_do() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"[BOS]": 0, "[USER]": 1, "[SYSTEM]": 2, "[ANSWER]": 3, "[UNK]": 4, "what": 5, "?": 6, "brief": 7}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["[BOS]", "[USER]", "[SYSTEM]", "[ANSWER]"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", pair="[BOS] $A $B", special_tokens=[("[BOS]", 0)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="[BOS]", unk_token="[UNK]")
    assert PromptTemplate(tokenizer).render("what?", "w") == ("what?", [0, 5, 6])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role | upper }}] {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}[ANSWER]{% endif %}"
    )
    text, token_ids = PromptTemplate(tokenizer, system_prompt="brief").render("what?", "w")
    assert text == "[BOS][SYSTEM] brief [USER] what? [ANSWER]"
    assert token_ids == [0, 2, 7, 1, 5, 6, 3]
