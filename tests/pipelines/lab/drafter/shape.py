"""The shape of a small EAGLE3 head."""

from pipelines.lab.drafter.head import HeadConfig

CONFIG = HeadConfig(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=20,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    aux_layers=(1, 2, 3),
)
