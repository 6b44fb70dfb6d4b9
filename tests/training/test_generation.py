import pytest
import torch

from axonlaunch.config.options.model import GPTConfig
from axonlaunch.models.build import build_model
from axonlaunch.training.text.generation import generate
from axonlaunch.training.text.sampling_options import SamplingOptions


@pytest.fixture(scope="module")
def model():
    return build_model(
        GPTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, initializer_range=1.0)
    )


def test_a_seed_gives_the_same_text(model):
    def text(seed):
        return generate(model, [1, 2], SamplingOptions(tokens=20, seed=seed), context_length=8)

    assert len(text(0)) == 20
    assert text(0) == text(0)
    assert text(0) != text(1)


def test_no_temperature_takes_the_likeliest_token(model):
    tokens = [5, 6]
    expected = []
    for _ in range(6):
        with torch.no_grad():
            expected.append(int(model(torch.tensor([tokens + expected]))[0, -1].argmax()))
    got = generate(model, tokens, SamplingOptions(tokens=6, temperature=0), context_length=100)
    assert got == expected
    greedy = generate(
        model, tokens, SamplingOptions(tokens=6, temperature=9, top_k=1), context_length=100
    )
    assert greedy == expected


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 5e-324])
def test_a_tiny_temperature_takes_the_likeliest_token(model, temperature):
    greedy, tiny = (
        generate(model, [5, 6], SamplingOptions(tokens=6, temperature=value), context_length=100)
        for value in (0, temperature)
    )
    assert tiny == greedy


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_top_p_samples_from_the_tokens_that_transformers_keeps(top_k, top_p):
    transformers = pytest.importorskip("transformers")
    logits = torch.tensor([0.1, 2.0, 1.0, 2.5, -1.0, 0.5, 2.0])
    warped = logits[None] / 0.7
    if top_k is not None:
        warped = transformers.TopKLogitsWarper(top_k)(None, warped)
    kept = transformers.TopPLogitsWarper(top_p)(None, warped)[0].isfinite().nonzero().flatten()

    def model(tokens):
        return logits.expand(1, tokens.shape[1], -1)

    options = SamplingOptions(tokens=400, temperature=0.7, top_k=top_k, top_p=top_p)
    sampled = generate(model, [0], options, context_length=1)
    assert set(sampled) == set(kept.tolist())


@pytest.mark.parametrize("top_p", [0, 1.1, float("nan")])
def test_top_p_outside_of_probabilities_is_refused(top_p):
    with pytest.raises(ValueError, match=r"top_p=.*: must be above 0 and at most 1"):
        SamplingOptions(tokens=1, top_p=top_p)


def test_generation_truncates_to_context():
    lengths = []

    def model(tokens):
        lengths.append(tokens.tolist())
        return torch.nn.functional.one_hot(tokens + 1, 10).float()

    assert generate(model, [1], SamplingOptions(tokens=4, temperature=0), context_length=3) == [
        2,
        3,
        4,
        5,
    ]
    assert lengths == [[[1]], [[1, 2]], [[1, 2, 3]], [[2, 3, 4]]]


def test_generation_restores_training_mode(model):
    model.train()
    generate(model, [1], SamplingOptions(tokens=1), context_length=4)
    assert model.training


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1], {"temperature": -1.0}, "temperature=-1.0: must be 0 or more"),
        ([1], {"temperature": float("nan")}, "temperature=nan: must be 0 or more"),
        ([1], {"top_k": 0}, "top_k=0: must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_reported(model, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, SamplingOptions(tokens=1, **options), context_length=4)
