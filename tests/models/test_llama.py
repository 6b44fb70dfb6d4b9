import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from axonlaunch.comm import World
from axonlaunch.config.options.model import LlamaConfig
from axonlaunch.models.build import build_model
from axonlaunch.models.specs.loss import cross_entropy_sum

CONFIG = LlamaConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=80,
    vocab_size=61,
    max_position_embeddings=40,
    initializer_range=0.2,
)


def reference(weights: dict[str, Tensor], tokens: Tensor, config: LlamaConfig) -> Tensor:
    """Compute Llama as its paper and Hugging Face describe it, one position and one head at a
    time.
    """
    heads, groups = config.num_attention_heads, config.num_key_value_heads or 1
    size = config.hidden_size // heads
    length = tokens.shape[1]

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight

    def rotated(x: Tensor, position: int) -> Tensor:
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :])
        frequencies = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = position * frequencies
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real, turned.imag), -1)

    x = weights["embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        w = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        y = rms_norm(x, w["input_layernorm.weight"])
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            mine, shared = (
                slice(head * size, (head + 1) * size),
                slice(group * size, (group + 1) * size),
            )
            q = y @ w["self_attn.q_proj.weight"][mine].T
            k = y @ w["self_attn.k_proj.weight"][shared].T
            v = y @ w["self_attn.v_proj.weight"][shared].T
            q = torch.stack([rotated(q[:, t], t) for t in range(length)], 1)
            k = torch.stack([rotated(k[:, t], t) for t in range(length)], 1)
            attended = []
            for t in range(length):
                scores = (q[:, t, None] * k[:, : t + 1]).sum(-1) / size**0.5
                attended.append((scores.softmax(-1)[..., None] * v[:, : t + 1]).sum(1))
            outputs.append(torch.stack(attended, 1))
        x = x + torch.cat(outputs, -1) @ w["self_attn.o_proj.weight"].T
        y = rms_norm(x, w["post_attention_layernorm.weight"])
        gate = y @ w["mlp.gate_proj.weight"].T
        up = y @ w["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
    return rms_norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T


def test_llama_gives_the_logits_and_gradients_of_a_plain_fp64_reference():
    model = build_model(CONFIG, seed=1)
    with torch.no_grad():  # norms start at one, which would hide a forgotten weight
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    tokens = torch.randint(0, 61, (2, 11), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}

    logits, expected = model(tokens), reference(weights, tokens, CONFIG)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)

    cross_entropy_sum(logits, targets).backward()
    torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), targets.flatten(), reduction="sum"
    ).backward()
    for name, parameter in model.named_parameters():
        gradient, wanted = parameter.grad.double(), weights[name].grad
        difference = (gradient - wanted).norm() / wanted.norm()
        assert difference < 1e-5, (name, difference)


def test_one_key_value_head_for_each_query_head_is_plain_attention():
    config = LlamaConfig(num_key_value_heads=None, hidden_size=32, num_attention_heads=4)
    model = build_model(config)
    block = model.layers[0].self_attn
    assert block.k_proj.weight.shape == block.q_proj.weight.shape
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 256)


def test_logits_do_not_depend_on_later_tokens():
    model = build_model(CONFIG)
    tokens = torch.randint(0, 61, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 61
    torch.testing.assert_close(model(tokens)[:, :8], model(changed)[:, :8])


def test_parameters_carry_the_names_of_hugging_face():
    names = {name for name, _ in build_model(CONFIG).named_parameters()}
    block = {
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
        "input_layernorm",
        "post_attention_layernorm",
    }
    expected = {f"layers.{i}.{part}.weight" for i in range(3) for part in block}
    assert names == expected | {"embed_tokens.weight", "norm.weight", "lm_head.weight"}


def test_rotary_tables_are_in_no_checkpoint_and_are_exact_far_out():
    model = build_model(LlamaConfig(max_position_embeddings=131072, num_hidden_layers=1))
    assert not [name for name in model.state_dict() if "rotary" in name]
    position, size = 131071, 16
    exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
    expected = (position * 500_000.0**-exponents).cos().float()
    assert torch.equal(model.rotary.cos[position], expected.repeat(2))


def test_llama_with_divided_heads_runs_same_code():
    model = build_model(CONFIG)
    attention = model.layers[0].self_attn
    x = torch.randn(1, 5, 48)
    full = attention(x, model.rotary)
    halves = []
    for rank in range(2):  # two ranks: 3 query heads and 1 key-value head each
        part = build_model(CONFIG).layers[0].self_attn
        for name, rows in (("q_proj", 24), ("k_proj", 8), ("v_proj", 8)):
            weight = getattr(attention, name).weight[rank * rows : (rank + 1) * rows]
            getattr(part, name).weight = torch.nn.Parameter(weight.detach())
        columns = attention.o_proj.weight[:, rank * 24 : (rank + 1) * 24]
        part.o_proj.weight = torch.nn.Parameter(columns.detach())
        halves.append(part(x, model.rotary))
    torch.testing.assert_close(halves[0] + halves[1], full)


def test_fsdp_in_bf16_keeps_the_rotary_tables_in_fp32():
    def rank(world: World) -> torch.dtype:
        mesh = init_device_mesh("cpu", (2,))
        model = build_model(CONFIG)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        dtypes = []
        model.layers[1].self_attn.register_forward_pre_hook(
            lambda module, arguments: dtypes.extend([arguments[0].dtype, arguments[1].cos.dtype])
        )
        assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16
        return tuple(dtypes)

    assert World.mock(2).run(rank) == [(torch.bfloat16, torch.float32)] * 2
