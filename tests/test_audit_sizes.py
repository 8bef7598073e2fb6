"""Sizes that no argument has are refused: an audit that looks for them would pass for every program."""

import jax
import jax.numpy as jnp
import pytest

from logitless import assert_logitless, linear_cross_entropy


def _naive(hidden, lm_head, labels):
    logprobs = jax.nn.log_softmax(hidden @ lm_head)
    return -jnp.sum(jnp.take_along_axis(logprobs, labels[..., None], axis=-1))


def _arguments(tokens=(4, 64), hidden_size=32):
    return (
        jax.ShapeDtypeStruct((*tokens, hidden_size), "float32"),
        jax.ShapeDtypeStruct((hidden_size, 5000), "float32"),
        jax.ShapeDtypeStruct(tokens, "int32"),
    )


@pytest.mark.parametrize("num_tokens", [513, 600, 999_999])
def test_another_number_of_tokens(num_tokens):
    with pytest.raises(ValueError, match=rf"num_tokens {num_tokens}.*\(4, 64, 32\).*no argument has that many tokens"):
        assert_logitless(_naive, *_arguments(), vocab_size=5000, num_tokens=num_tokens)


@pytest.mark.parametrize("tokens", [(4, 64), (4, 50), (200,)], ids=str)
@pytest.mark.parametrize("vocab_size", [7777, 100, 4000, 50_257])
def test_another_vocabulary(vocab_size, tokens):
    count = 1
    for size in tokens:
        count *= size
    with pytest.raises(ValueError, match="no argument or closed-over array has a vocabulary axis"):
        assert_logitless(_naive, *_arguments(tokens), vocab_size=vocab_size, num_tokens=count)


@pytest.mark.parametrize("num_tokens", [256, 250, 64])
def test_the_tokens_padded_and_those_of_a_row_are_found(num_tokens):
    with pytest.raises(AssertionError, match="holds logits"):
        assert_logitless(_naive, *_arguments(), vocab_size=5000, num_tokens=num_tokens)


def test_a_training_step_that_takes_gradients_itself():
    def step(hidden, lm_head, labels):
        loss = jax.value_and_grad(linear_cross_entropy, argnums=1)
        value, gradient = loss(hidden, lm_head, labels)
        return value, lm_head - 0.1 * gradient

    with pytest.raises(NotImplementedError) as error:
        assert_logitless(step, *_arguments(), vocab_size=5000, num_tokens=256)
    assert any("differentiate=()" in note for note in error.value.__notes__)
    assert_logitless(step, *_arguments(), vocab_size=5000, num_tokens=256, differentiate=())
