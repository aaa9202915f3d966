"""Meta's format written from a Hugging Face model: the inverse of what rope_ext.convert does, written out by itself."""

import json

import torch

PARTS = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
ENDS = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
}
BY_COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")


def neighbours(weight, head_dim):
    """Return rows that were in halves as neighbouring pairs, one row at a time."""
    half = head_dim // 2
    order = [head + i + j * half for head in range(0, len(weight), head_dim) for i in range(half) for j in (0, 1)]
    return weight[order]


def meta_weights(model, *, permute=True):
    """Return a model's weights by Meta's names and, unless told otherwise, in Meta's layout."""
    weights = {}
    for name, tensor in model.state_dict().items():
        if name in ENDS:
            weights[ENDS[name]] = tensor
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        moved = permute and part in {"self_attn.q_proj", "self_attn.k_proj"}
        weights[f"layers.{layer}.{PARTS[part]}.weight"] = neighbours(tensor, model.config.head_dim) if moved else tensor
    return weights


def params_of(model, **changes):
    config = model.config
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        **changes,
    }
    return {key: value for key, value in params.items() if value != "absent"}


def cut(weights, num_shards, *, embedding_axis=1):
    """Return the shards of a tensor-parallel group."""
    shards = [{} for _ in range(num_shards)]
    for name, tensor in weights.items():
        axis = 1 if name.endswith(BY_COLUMNS) else 0
        if name == "tok_embeddings.weight":
            axis = embedding_axis
        parts = [tensor] * num_shards if tensor.dim() == 1 else tensor.chunk(num_shards, dim=axis)
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = part.clone()
    return shards


def write(directory, params, shards):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "params.json").write_text(json.dumps(params))
    for i, shard in enumerate(shards):
        torch.save(shard, directory / f"consolidated.{i:02d}.pth")
    return directory
