"""The rival of model=hf: a script written by hand to train a Llama of transformers."""

import os

import torch
import torch.distributed as dist
from torchrun_train import arguments, shard, train
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Train a Llama under fully_shard."""
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=args.length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    shard(model, model.model.layers)
    train(args, model, lambda tokens: model(input_ids=tokens).logits)


if __name__ == "__main__":
    main()
    os._exit(0)
