"""Tiny random models, made on the spot: nothing is downloaded."""

import json

import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

VOCABULARY = 512
MAX_TOKENS = 4096


def tiny_llama(directory, seed=0, dtype=torch.bfloat16, **changes):
    """Write a Llama of 4 layers and 2.6 M parameters, whose KV is 512 bytes a token and layer; engines need no
    tokenizer, since the tests speak in token ids."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        **changes,
    }
    LlamaForCausalLM(LlamaConfig(**shape)).to(dtype).save_pretrained(directory, safe_serialization=True)
    return str(directory)


def tiny_deepseek(directory):
    """A DeepSeek of 2 layers with latent attention, in the one size of latent vector that vLLM has for the CPU."""
    torch.manual_seed(4)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=2,  # no experts: all layers are dense
        max_position_embeddings=MAX_TOKENS,
        # As DeepSeek's own have it. With plain rotary positions what vLLM computes on a CPU depends on the batch.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": MAX_TOKENS // 2,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    DeepseekV2ForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return str(directory)


def tiny_gemma(directory, window, layers=("sliding_attention", "full_attention") * 2):
    """A Gemma 3 in which some layers, by default every other one, look back `window` tokens only."""
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=len(layers),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.1,
        sliding_window=window,
        layer_types=list(layers),
        tie_word_embeddings=False,  # else it says the same token for ever
    )
    Gemma3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


def tiny_adapter(directory, seed):
    """A LoRA for `tiny_llama` that changes keys and values of all layers."""
    draw = torch.Generator().manual_seed(seed)
    directory.mkdir(parents=True)
    targets, rank = {"k_proj": 128, "v_proj": 128}, 8
    tensors = {}
    for layer in range(4):
        for target, width in targets.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, 256, generator=draw, dtype=torch.float32) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, rank, generator=draw, dtype=torch.float32) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def prompts(count, tokens, seed=1, shared=0):
    """`count` prompts of `tokens` ids; the first `shared` are the same in all."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randint(3, VOCABULARY, (shared,), generator=draw).tolist()
    return [common + torch.randint(3, VOCABULARY, (tokens - shared,), generator=draw).tolist() for _ in range(count)]
