"""The rival of divided experts: a hand-written script with transformers' own expert plan."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torchrun_train import arguments, train
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig


def main() -> None:
    """Train a Qwen3-MoE whose experts are divided among all ranks."""
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        moe_intermediate_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=args.hidden // 4,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=args.length,
        use_cache=False,
    )
    folder = args.out.parent / "model"
    if not dist.get_rank():
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    world = dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=world),
    )
    experts: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (experts if ".experts." in name else others).append(parameter)
    train(args, [experts, others], lambda tokens: model.train()(input_ids=tokens).logits)


if __name__ == "__main__":
    main()
    os._exit(0)
