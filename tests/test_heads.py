import pytest

from logitless.heads import HEADS, head


def test_names_are_keys_and_lower_case():
    assert all(name == entry.name == name.lower() for name, entry in HEADS.items())


@pytest.mark.parametrize(
    ("name", "hidden_size", "vocab_size", "tied"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 576, 49_152, True),
        ("Qwen/Qwen2.5-1.5B", 1536, 151_936, True),
        ("qwen2.5-7b-instruct", 3584, 152_064, False),
        ("google/gemma-2-2b-it", 2304, 256_000, True),
        ("meta-llama/Llama-3.1-8B-Instruct", 4096, 128_256, False),
    ],
)
def test_a_name_as_on_the_hub_is_found(name, hidden_size, vocab_size, tied):
    found = head(name)
    assert (found.hidden_size, found.vocab_size, found.tied) == (hidden_size, vocab_size, tied)


def test_only_gemma_2_caps_its_final_logits():
    assert {name for name, entry in HEADS.items() if entry.softcap is not None} == {
        "gemma-2-2b",
        "gemma-2-9b",
        "gemma-2-27b",
    }


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"no model named 'qwen2.5-1.6b'; nearest known: qwen2.5-1.5b"):
        head("qwen2.5-1.6b")


def test_a_name_near_to_nothing_is_answered_with_all():
    with pytest.raises(ValueError, match="known: gpt2, .*hidden_size and vocab_size"):
        head("@@@@")
