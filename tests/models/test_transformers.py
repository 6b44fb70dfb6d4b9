import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from axonlaunch.config.options.model import GPTConfig, LlamaConfig, MLPConfig, ViTConfig
from axonlaunch.config.problems.errors import ConfigError
from axonlaunch.models.build import build_model, construct, spec_for
from axonlaunch.models.specs.loss import cross_entropy_sum
from axonlaunch.models.specs.model_spec import IGNORE_INDEX

GPT = GPTConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=50)
LLAMA = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)
VIT = ViTConfig(hidden_size=32, image_size=16, num_channels=3)
MLP = MLPConfig(input_size=3 * 16 * 16, hidden_size=20, num_hidden_layers=4)
CONFIGS = [GPT, LLAMA, VIT, MLP]


def batch(config):
    generator = torch.Generator().manual_seed(0)
    if spec_for(config).inputs == "tokens":
        tokens = torch.randint(0, 50, (3, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    images = torch.randn(3, 3, 16, 16, generator=generator)
    return images, torch.randint(0, 10, (3,), generator=generator)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_parameter_gets_a_gradient(config):
    model = build_model(config)
    inputs, targets = batch(config)
    outputs = model(inputs)
    assert outputs.shape == (*targets.shape, 50 if targets.ndim == 2 else 10)
    cross_entropy_sum(outputs, targets).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_a_few_steps_of_training_lower_the_loss(config):
    model = build_model(config)
    inputs, targets = batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = cross_entropy_sum(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_models_trace_without_values(config):
    model = construct(config, seed=0)
    inputs, targets = batch(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model(inputs.to("meta")).shape[:-1] == targets.shape


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_partial_stages_equal_full_model(config):
    full = build_model(config)
    inputs, _ = batch(config)
    early, late = copy.deepcopy(full), copy.deepcopy(full)
    for number in (2, 3):
        early.layers[number] = None
    for number in (0, 1):
        late.layers[number] = None
    for part in ("norm", "lm_head", "head"):
        if hasattr(early, part):
            setattr(early, part, None)
    for part in ("embed_tokens", "embed_positions", "embed_patches"):
        if hasattr(late, part):
            setattr(late, part, None)
    torch.testing.assert_close(late(early(inputs)), full(inputs))
    names = {name for name, _ in late.named_parameters()}
    assert any(name.startswith("layers.3.") for name in names)
    assert list(spec_for(config).blocks(late)) == ["layers.2", "layers.3"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads it from a block's input
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=lambda config: config.name)
def test_all_blocks_compile_into_one_graph_once(config):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = build_model(config), build_model(config)
    inputs, _ = batch(config)
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(model(inputs), plain(inputs))
    model(inputs).sum().backward()
    assert counter.frame_count == 1


def test_gpt_shares_one_matrix_between_embedding_and_head():
    model = build_model(GPT)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    untied = build_model(GPTConfig(tie_word_embeddings=False))
    assert untied.lm_head.weight is not untied.embed_tokens.weight


def test_vit_attention_is_not_causal():
    model = build_model(VIT)
    image = torch.randn(1, 3, 16, 16, requires_grad=True)
    model(image)[0, 0].backward()
    assert (image.grad.abs().sum((0, 1)) > 0).all()


def test_the_loss_is_a_sum_over_counted_targets():
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = torch.randint(0, 7, (2, 5))
    targets[0, 2:] = IGNORE_INDEX
    chances = logits.softmax(-1)
    expected = -sum(
        chances[b, t, targets[b, t]].log()
        for b in range(2)
        for t in range(5)
        if targets[b, t] != IGNORE_INDEX
    )
    loss = cross_entropy_sum(logits.float(), targets)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    assert loss.ndim == 0


def test_the_loss_of_bf16_outputs_is_computed_in_fp32():
    logits = torch.randn(64, 100).bfloat16()
    targets = torch.randint(0, 100, (64,))
    loss = cross_entropy_sum(logits, targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, cross_entropy_sum(logits.float(), targets))


def test_loss_of_fully_ignored_batch_is_zero():
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


def test_figures_that_do_not_fit_are_refused_before_anything_is_built():
    with pytest.raises(ConfigError) as error:
        build_model(GPTConfig(hidden_size=100, num_attention_heads=3))
    assert str(error.value) == (
        "model.num_attention_heads=3: hidden_size=100 is not divisible by it; "
        "use 1, 2, 4, 5, 10, 20, 50 or 100"
    )


def test_wrong_path_of_blocks_is_reported_with_existing_names():
    from dataclasses import replace

    spec = replace(spec_for(GPT), layers="blocks")
    with pytest.raises(
        ConfigError, match=r"model.layers=blocks: Linear has no such module.*nothing"
    ):
        spec.blocks(nn.Linear(1, 1))
